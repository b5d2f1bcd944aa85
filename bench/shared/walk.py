"""Count of the code that a run walks through: modules imported, and files in which a function runs.

    python -m bench.shared.walk optimize model.pt --backend ort --quant int8

The words are those of the command line. A file counts once a function or method of it is called (`sys.setprofile`, in
all threads of this process); the body of a module, of a class and of a comprehension is no function. Times of such a
run mean nothing.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Collection
from inspect import CO_NEWLOCALS
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from bench.shared.repository import ROOT

PACKAGES = ("infer", "backends")
# Beside the bodies of classes, which lack CO_NEWLOCALS.
NO_FUNCTIONS = ("<module>", "<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<lambda>")


def walked(run: Callable[[], object]) -> set[Path]:
    """Call `run` and return the project's files in which a function ran."""
    seen: set[CodeType] = set()
    running = True

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and running:  # threads that live on keep their profile function
            seen.add(frame.f_code)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        running = False
    functions = (code for code in seen if code.co_name not in NO_FUNCTIONS and code.co_flags & CO_NEWLOCALS)
    files = {Path(code.co_filename) for code in functions}
    inside = (path.relative_to(ROOT) for path in files if path.is_relative_to(ROOT))
    return {path for path in inside if path.parts[0] in PACKAGES}


def imported() -> set[str]:
    """Return the project's modules that this process has imported."""
    return {name for name in sys.modules if name.partition(".")[0] in PACKAGES}


def _by_package(names: Collection[str]) -> str:
    counts = Counter(".".join(name.split(".")[:2]) for name in names)
    return ", ".join(f"{package} {count}" for package, count in counts.most_common())


def main() -> int:
    from infer.cli import main as command_line

    code = 0

    def run() -> None:
        nonlocal code
        try:
            command_line(sys.argv[1:])
        except SystemExit as end:
            code = int(end.code or 0)

    files, modules = walked(run), imported()
    print(f"files in which a function runs: {len(files)}", file=sys.stderr)
    print(f"    {_by_package(['.'.join(path.with_suffix('').parts) for path in files])}", file=sys.stderr)
    print(f"modules imported: {len(modules)}", file=sys.stderr)
    print(f"    {_by_package(modules)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
