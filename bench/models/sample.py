"""Sample of models that nobody chose: transformers' classes and timm's architectures, drawn with a seed.

    python -m bench.models.sample [--seed N] [--count 40] [--only transformers|timm] [--rows NAME …] [--resume]

Models are tiny or small, with random weights; nothing is downloaded. timm needs `pip install timm torchvision`. Each
row runs in a process of its own, on plain torch. Outcomes go to results/sample-LIBRARY-DATE-CPU.json and .md; `--rows`
runs rows by name (`MODEL_TYPE:CLASS`, or an architecture of timm) in place of those drawn, `--resume` only those
that the file lacks. Exits 1 when a row crashed or gave other numbers than the original.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

import msgspec

from bench.models import sample_configs, sample_timm
from bench.models.checks import BROKEN, NONE, REFUSED, Cell
from bench.models.table import compute, kind_of
from bench.shared.results import machine_header, result_path

SEED, COUNT = 20261125, 40
SECONDS = 900  # of one row
KINDS = {"transformers": "sample_transformers", "timm": "sample_timm"}


def drawn(library: str, seed: int, count: int) -> list[str]:
    """Return the names of rows that a seed draws."""
    if library == "timm":
        return sample_timm.draw(seed, count)
    return [f"{one.model_type}:{one.model}" for one in sample_configs.draw(seed, count)]


def verdict(cells: dict[str, Cell]) -> str:
    """Return the outcome of a row in one word or two."""
    found = [cell for cell in cells.values() if cell.outcome != NONE]
    broken = [cell for cell in found if cell.outcome == BROKEN]
    if broken:
        return "wrong" if broken[0].why.startswith("wrong") else "crash"
    if not found:
        return "not made"
    refused = [cell for cell in found if cell.outcome == REFUSED]
    if not refused:
        return "works"
    return "refused" if cells["opens"].outcome == REFUSED else "float works, int8 refused"


def keep(path: Path, library: str, row: str, cells: dict[str, Cell]) -> None:
    """Put a row into the result file and write its page again."""
    head = json.loads(path.read_text()) if path.exists() else machine_header(library=library, rows={})
    head["rows"][row] = msgspec.to_builtins(cells)
    path.write_text(json.dumps(head, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(page(library, head["date"], read(path)))


def read(path: Path) -> dict[str, dict[str, Cell]]:
    """Return the rows of a result file by name, none where it does not exist."""
    found = json.loads(path.read_text())["rows"] if path.exists() else {}
    return msgspec.convert(found, dict[str, dict[str, Cell]])


def page(library: str, date: str, rows: dict[str, dict[str, Cell]]) -> str:
    """Render a result file: a count of outcomes, then a line for each row."""
    columns = kind_of(KINDS[library]).COLUMNS
    counts = Counter(verdict(cells) for cells in rows.values())
    lines = [f"# Sample of models of {library}, {date}", ""]
    lines += [", ".join(f"{number} {what}" for what, number in counts.most_common()), ""]
    lines += [f"| | outcome | {' | '.join(columns)} |", "|---" * (len(columns) + 2) + "|"]
    for name, cells in rows.items():
        told = (_text(cells.get(column, Cell(NONE))) for column in columns)
        lines.append(f"| {name} | {verdict(cells)} | {' | '.join(told)} |")
    return "\n".join(lines) + "\n"


def _text(cell: Cell) -> str:
    text = f"{cell.outcome}: {cell.why}" if cell.why else cell.outcome
    return text.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--count", type=int, default=COUNT, help="models of each library")
    parser.add_argument("--only", choices=tuple(KINDS), help="one library")
    parser.add_argument("--rows", nargs="+", default=[], metavar="NAME", help="these in place of drawn ones")
    parser.add_argument("--resume", action="store_true", help="only rows that the result file lacks")
    parser.add_argument("--name", default="sample", help="beginning of the result file's name")
    arguments = parser.parse_args()
    failed = False
    for library in [arguments.only] if arguments.only else KINDS:
        path = result_path(f"{arguments.name}-{library}")
        names = [row for row in arguments.rows if (":" in row) == (library == "transformers")]
        names = names if arguments.rows else drawn(library, arguments.seed, arguments.count)
        known = read(path) if arguments.resume else {}
        for row, cells in compute(KINDS[library], [name for name in names if name not in known], SECONDS):
            keep(path, library, row, cells)
            failed |= verdict(cells) in ("wrong", "crash")
            told = "; ".join(f"{c}: {_text(cell)}" for c, cell in cells.items())
            print(f"{row}: {verdict(cells)}. {told}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
