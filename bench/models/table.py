"""Models table: architecture × {captured, decodes, int8:weight, nf4, served}, heads and checkpoints; docs/models.md.

    python -m bench.models.table [--only 'decoders,llama*;heads,*'] [--resume | --render]

Models are tiny and random, made by transformers' own configurations; nothing is downloaded. Each row is computed in a
process of its own by plain torch (backend eager). Cells are merged one by one into bench/results/models.json, of which
docs/models.md is made after each row. `--resume`: only rows that the file lacks; `--render`: compute nothing. Exits 1
when a cell that was computed is broken: neither works nor is refused with a reason.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import logging
import subprocess
import sys
import tempfile
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from bench.models.checks import BROKEN, NONE, REFUSED, WORKS, Cell, without_memory_probe
from bench.shared.repository import RESULTS, ROOT, child_environment, module_command

KINDS = ("decoders", "heads", "checkpoints")
RESULT, PAGE = RESULTS / "models.json", ROOT / "docs" / "models.md"
SECONDS = 600  # of one row
Rows = dict[str, dict[str, dict[str, Cell]]]  # kind → row → column
INTRO = """# Models

Made by `make models` from tiny random checkpoints of transformers' own configurations; nothing is downloaded. *works*
means that the check of the column passed, *refused* that `infer` says in one sentence why not, *broken* is a fault.
"""


def kind_of(name: str) -> Any:
    """Return the module of a kind of rows: TITLE, COLUMNS, ENTRIES, run(name, folder)."""
    return import_module(f"bench.models.{name}")


def compute(kind: str, row: str) -> dict[str, Cell]:
    """Compute one row in a process of its own; what it has found before it dies is kept."""
    cells = {column: Cell(NONE) for column in kind_of(kind).COLUMNS}
    command = module_command("bench.models.table", "--row", kind, row)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as said:
        try:
            code = subprocess.run(
                command, stdout=out, stderr=said, env=child_environment(), timeout=SECONDS, check=False
            ).returncode
            ended = "" if code == 0 else f"the process ended with code {code}"
        except subprocess.TimeoutExpired:
            ended = f"no end after {SECONDS} s"
        out.seek(0)
        said.seek(0)
        for line in out.read().decode().splitlines():
            with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
                column, cell = msgspec.json.decode(line, type=tuple[str, Cell])
                cells[column] = cell
        if ended:
            last = (said.read().decode(errors="replace").strip().splitlines() or [""])[-1]
            missing = next((c for c, cell in cells.items() if cell.outcome == NONE), None)
            if missing is not None:
                cells[missing] = Cell(BROKEN, f"{ended}: {last[:200]}")
    return cells


def run_row(kind: str, row: str) -> None:
    """Compute one row in this process and print a JSON line for each cell."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    without_memory_probe()
    out = sys.stdout
    with tempfile.TemporaryDirectory(prefix="row-") as folder, contextlib.redirect_stdout(sys.stderr):
        for column, cell in kind_of(kind).run(row, Path(folder)):
            print(msgspec.json.encode((column, cell)).decode(), file=out, flush=True)


def read() -> Rows:
    """Return the rows of the result file."""
    if not RESULT.exists():
        return {kind: {} for kind in KINDS}
    return {kind: {} for kind in KINDS} | msgspec.json.decode(RESULT.read_bytes(), type=Rows)


def write(rows: Rows) -> None:
    """Write the result file, rows in the order of their entries, and the page."""
    ordered = {k: {row: rows[k][row] for row in kind_of(k).ENTRIES if row in rows[k]} for k in KINDS}
    RESULT.write_text(json.dumps(msgspec.to_builtins(ordered), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(INTRO + "".join(section(kind, ordered[kind]) for kind in KINDS if ordered[kind]))


def section(kind: str, rows: dict[str, dict[str, Cell]]) -> str:
    """Render one kind of rows: a count, then the table."""
    module = kind_of(kind)
    good = sum(all(cell.outcome == WORKS for cell in row.values()) for row in rows.values())
    about = " ".join(module.__doc__.split("\n\n")[1].split())
    lines = [f"\n## {module.TITLE}\n", f"{about}\n", f"{good} of {len(rows)} work in every column.\n"]
    lines += [f"| | {' | '.join(module.COLUMNS)} |", "|---" * (len(module.COLUMNS) + 1) + "|"]
    for name, row in rows.items():
        lines.append(f"| {name} | {' | '.join(shown(row.get(c, Cell(NONE))) for c in module.COLUMNS)} |")
    return "\n".join(lines) + "\n"


def shown(cell: Cell) -> str:
    """Render one cell."""
    why = cell.why.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
    return f"{cell.outcome}: {why}" if why else cell.outcome


def matches(kind: str, row: str, only: str) -> bool:
    """Return True if one of the patterns `KIND,ROW;…` fits; a pattern without a row fits all of its kind."""
    patterns = [[*part.split(","), "*"][:2] for part in only.split(";")]
    return any(fnmatch.fnmatch(kind, k) and (fnmatch.fnmatchcase(row, r) or row == r) for k, r in patterns)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="*", help="KIND,ROW with wildcards, several joined by ;")
    parser.add_argument("--resume", action="store_true", help="only rows that the result file lacks")
    parser.add_argument("--render", action="store_true", help="compute nothing, write the page again")
    parser.add_argument("--row", nargs=2, metavar=("KIND", "ROW"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.row:
        run_row(*arguments.row)
        return 0
    every = [(kind, row) for kind in KINDS for row in kind_of(kind).ENTRIES]
    rows = read()
    wanted = [] if arguments.render else [key for key in every if matches(*key, arguments.only)]
    wanted = [key for key in wanted if not (arguments.resume and key[1] in rows[key[0]])]
    if not wanted and not arguments.render:
        parser.error(f"no row is left of {arguments.only!r}")
    broken = False
    for kind, row in wanted:
        found = compute(kind, row)
        rows = {**read()}  # another process may have written other rows
        rows[kind][row] = found
        write(rows)
        broken |= any(
            cell.outcome == BROKEN or (cell.outcome == REFUSED and not cell.why) for cell in found.values()
        )
        print(
            f"{kind}, {row}: " + "; ".join(f"{column} {shown(cell)}" for column, cell in found.items()),
            flush=True,
        )
    if arguments.render:
        write(rows)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
