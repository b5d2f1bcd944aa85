"""Models table: architecture × {captured, decodes, int8:weight, nf4, served}, heads and checkpoints; docs/models.md.

    python -m bench.models.table [--only 'decoders,llama*;heads,*'] [--resume | --render]

Models are tiny and random, made by transformers' own configurations; nothing is downloaded. Rows are computed in a
process of their own by plain torch (backend eager). Cells are merged row by row into bench/results/models.json, of
which docs/models.md is made; several processes may fill it, each with its own `--only`. `--resume`: only rows that the
file lacks; `--render`: compute nothing. Exits 1 when a cell that was computed is broken: neither works nor is refused
with a reason.
"""

from __future__ import annotations

import fcntl
import fnmatch
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

from bench.models.checks import BROKEN, NONE, WORKS, Cell
from bench.shared.child_process import ChildProcess, EngineCrashed
from bench.shared.command_line import parser_of
from bench.shared.repository import RESULTS, ROOT
from bench.shared.unmeasured_memory import skip_memory

KINDS = ("decoders", "image_texts", "heads", "checkpoints", "quantized_sources")
RESULT, PAGE = RESULTS / "models.json", ROOT / "docs" / "models.md"
SECONDS = 3600  # of one row, on a machine that others use too
SHOWN = 160  # characters of a reason on the page; the result file has more
Rows = dict[str, dict[str, dict[str, Cell]]]  # kind → row → column
INTRO = """# Models

Made by `make models` from tiny random checkpoints of transformers' own configurations; nothing is downloaded. *works*
means that the check of the column passed, *refused* that `infer` says in one sentence why not, *broken* is a fault.
"""


def kind_of(name: str) -> Any:
    """Return the module of a kind of rows: TITLE, COLUMNS, ENTRIES, run(name, folder)."""
    return import_module(f"bench.models.{name}")


class RowProcess:
    """Rows of one kind in a process of its own; cells are asked for one by one, so that those before a crash stay."""

    def __init__(self, kind: str) -> None:
        warnings.filterwarnings("ignore")
        logging.disable(logging.WARNING)
        skip_memory()
        self._kind = kind_of(kind)

    def begin(self, row: str) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="row-")
        self._cells = self._kind.run(row, Path(self._folder.name))

    def next_cell(self) -> tuple[str, Cell] | None:
        """Return the next column with its cell; None after the last. A row that can't be set up is broken."""
        try:
            return next(self._cells, None)
        except Exception as error:  # noqa: BLE001 - the other rows go on
            self._cells = iter(())
            return self._kind.COLUMNS[0], Cell(BROKEN, f"{type(error).__name__}: {str(error)[:200]}")


def compute(
    kind: str, rows: Sequence[str], seconds: float = SECONDS
) -> Iterator[tuple[str, dict[str, Cell]]]:
    """Compute rows in a process that is started anew where it died or took too long; cells before that are kept.

    `seconds`: limit of one row.
    """
    child: ChildProcess | None = None
    for row in rows:
        child = child or ChildProcess(RowProcess, kind)
        cells = empty(kind)
        timer = threading.Timer(seconds, os.kill, (child.pid, signal.SIGKILL))
        timer.start()
        try:
            child.call("begin", row)
            while (found := child.call("next_cell")) is not None:
                cells[found[0]] = found[1]
        except EngineCrashed as error:
            missing = (column for column, cell in cells.items() if cell.outcome == NONE)
            cells[next(missing, kind_of(kind).COLUMNS[-1])] = Cell(BROKEN, f"the process {error}")
            child.close()
            child = None
        finally:
            timer.cancel()
        yield row, cells
    if child:
        child.close()


def empty(kind: str) -> dict[str, Cell]:
    """Return a row in which no column was tried."""
    return {column: Cell(NONE) for column in kind_of(kind).COLUMNS}


def read() -> Rows:
    """Return the rows of the result file."""
    if not RESULT.exists():
        return {kind: {} for kind in KINDS}
    return {kind: {} for kind in KINDS} | msgspec.json.decode(RESULT.read_bytes(), type=Rows)


def keep(kind: str, row: str, cells: dict[str, Cell]) -> None:
    """Put a row into the result file, which another process may be filling too."""
    with (Path(tempfile.gettempdir()) / "infer-models-table.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = read()
        rows[kind][row] = cells
        write(rows)


def write(rows: Rows) -> None:
    """Write the result file, rows in the order of their entries, and the page."""
    ordered = {k: {row: rows[k][row] for row in kind_of(k).ENTRIES if row in rows[k]} for k in KINDS}
    RESULT.write_text(json.dumps(msgspec.to_builtins(ordered), indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(INTRO + "".join(section(kind, ordered[kind]) for kind in KINDS if ordered[kind]))


def section(kind: str, rows: dict[str, dict[str, Cell]]) -> str:
    """Render one kind of rows: a count, then the table."""
    module = kind_of(kind)
    every = module.COLUMNS
    good = sum(all(row.get(c, Cell(NONE)).outcome == WORKS for c in every) for row in rows.values())
    about = " ".join(module.__doc__.split("\n\n")[1].split())
    lines = [f"\n## {module.TITLE}\n", f"{about}\n", f"{good} of {len(rows)} work in every column.\n"]
    # Column → row → text, of other benchmarks' results.
    found: dict[str, dict[str, str]] = module.measured() if hasattr(module, "measured") else {}
    titles = [*every, *found]
    lines += [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    for name, row in rows.items():
        cells = [
            *(shown(row.get(c, Cell(NONE))) for c in every),
            *(given.get(name, "–") for given in found.values()),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def shown(cell: Cell) -> str:
    """Render one cell: the outcome and the reason, shortened to whole words."""
    why = cell.why.removeprefix(f"{cell.outcome}, ")
    if len(why) > SHOWN:
        why = why[:SHOWN].rpartition(" ")[0].rstrip(" ,;:") + " …"
    why = why.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")
    return f"{cell.outcome}: {why}" if why else cell.outcome


def matches(kind: str, row: str, only: str) -> bool:
    """Return True if one of the patterns `KIND,ROW;…` fits; a pattern without a row fits all of its kind."""
    patterns = [[*part.split(",", 1), "*"][:2] for part in only.split(";")]
    return any(fnmatch.fnmatch(kind, k) and (fnmatch.fnmatchcase(row, r) or row == r) for k, r in patterns)


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="*", help="KIND,ROW with wildcards, several joined by ;")
    parser.add_argument("--resume", action="store_true", help="only rows that the result file lacks")
    parser.add_argument("--render", action="store_true", help="compute nothing, write the page again")
    arguments = parser.parse_args()
    every = [(kind, row) for kind in KINDS for row in kind_of(kind).ENTRIES]
    rows = read()
    wanted = [] if arguments.render else [key for key in every if matches(*key, arguments.only)]
    wanted = [key for key in wanted if not (arguments.resume and key[1] in rows[key[0]])]
    if not wanted and not arguments.render:
        parser.error(f"no row is left of {arguments.only!r}")
    broken = False
    for kind in KINDS:
        for row, found in compute(kind, [row for k, row in wanted if k == kind]):
            keep(kind, row, found)
            broken |= any(cell.outcome == BROKEN for cell in found.values())
            print(
                f"{kind}, {row}: " + "; ".join(f"{c} {shown(cell)}" for c, cell in found.items()), flush=True
            )
    if arguments.render:
        write(rows)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
