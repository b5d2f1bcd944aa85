"""Published model files given to `infer optimize` as they lie in their wheels: outcome, time, size, and true or not.

    python -m bench.real.table [--only 'silero,magika'] [--resume | --render] [--quant int8] [--timeout 120]

Wheels of `published_wheels.py` are downloaded by name into .work/real (or $INFER_REAL_WHEELS) on demand. Each file
gets the first command, `infer optimize FILE` with nothing else, then `--quant int8`, each in a process with a limit.
What is published is compared with the file in its own runtime (onnxruntime or torch, two threads): the task on real
inputs of ours, every number of the verdict measured again by code that shares nothing with the gate, speed in turns.
Rows are merged into bench/results/real-DATE-CPU.json and .md. Exits 1 where a bar is missed.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.real import claims
from bench.real.claims import Claim, Timed
from bench.real.published_file import PublishedFile
from bench.real.published_files import FILES, named
from bench.real.published_wheels import WheelError, cache_folder, unzipped
from bench.real.sides import THREADS, Measured, fresh_process, measure
from bench.shared import results_page
from bench.shared.bars import Bar, table
from bench.shared.child_process import EngineCrashed, apart
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT, child_environment, module_command
from bench.shared.results import TodaysRows

COMMANDS = {"first": (), "int8": ("--quant", "int8")}
PUBLISHED, NO_GAIN, REFUSED, FAILED, LATE, CODE, ABSENT = (
    "published", "no gain", "refused", "failed", "no answer", "needs code", "no wheel",
)  # fmt: skip
ANSWERS = (PUBLISHED, NO_GAIN)
FASTER, SMALLER, EQUAL = 1.2, 2.0, 1.05
LOSS = 0.02  # of a task measure, that is not lost
ANSWER_SECONDS = 15.0
LINE = 400  # characters kept of a message


class Row(msgspec.Struct, kw_only=True):
    """One command on one file."""

    name: str
    command: str  # "first" or "int8"
    kind: str
    measure: str
    outcome: str
    code: bool = False  # the file needs code, so that it is outside the bar of the first command
    exit: int | None = None
    seconds: float = 0.0
    said: str = ""
    verdict: list[str] = []
    backend: str = ""
    source_bytes: int = 0
    bytes: int | None = None
    claims: list[Claim] = []
    original_task: float | None = None
    task: float | None = None
    error: float | None = None
    real: list[Timed] = []
    why: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.name, self.command

    @property
    def untrue(self) -> list[str]:
        return claims.untrue(self.claims)

    @property
    def is_better(self) -> bool:
        """True if it is slower than the original at no batch, and faster at one or half as large."""
        if self.outcome != PUBLISHED or not self.real or self.bytes is None:
            return False
        ratios = [one.ratio for one in self.real]
        smaller = self.source_bytes / self.bytes >= SMALLER
        return max(ratios) <= EQUAL and (min(ratios) <= 1 / FASTER or smaller)


def run_file(entry: PublishedFile, command: str, work: Path, limit: float) -> Row:
    """Give one file one command, and measure what comes of it."""
    row = Row(name=entry.name, command=command, kind=entry.kind, measure=entry.measure, outcome=FAILED,
              code=bool(entry.code))  # fmt: skip
    try:
        row.source_bytes = entry.file.stat().st_size
    except (WheelError, OSError) as error:
        row.outcome, row.said = ABSENT, str(error)[:LINE]
        return row
    if entry.needs:
        row.outcome, row.said = CODE, f"needs {entry.needs}"
        return row
    folder = work / "out.infer"
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.perf_counter()
    row.exit, out, err = _optimize(entry, command, folder, entry.timeout or limit)
    row.seconds = time.perf_counter() - begin
    row.outcome, row.said = outcome_of(row.exit, out, err)
    if row.outcome == PUBLISHED:
        _judge(entry, row, folder)
    return row


def _optimize(entry: PublishedFile, command: str, folder: Path, limit: float) -> tuple[int | None, str, str]:
    """Run the command line in a session of its own; its exit code, None after the limit, and what it printed."""
    code = list(entry.code)
    if "--model" in code:
        code[1] = f"{ROOT / 'bench/real/model_classes.py'}:{code[1]}"
    words = ["optimize", str(entry.file), *code, *COMMANDS[command], "--output", str(folder)]
    with subprocess.Popen(
        module_command("infer", *words),
        cwd=folder.parent,
        env=child_environment(OMP_NUM_THREADS=str(THREADS), COLUMNS="160", NO_COLOR="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, err = process.communicate()
            return None, out, err
    return process.returncode, out, err


def outcome_of(code: int | None, out: str, err: str) -> tuple[str, str]:
    """Return the outcome and what was said of it."""
    said = " ".join(line.strip() for line in err.splitlines() if line.startswith("infer:"))
    last = said or (err.strip().splitlines() or out.strip().splitlines() or [""])[-1]
    if code is None:
        return LATE, f"after the limit at: {last.strip()[:LINE]}"
    if code == 0:
        return PUBLISHED, " ".join(out.split("\n\n")[0].split())[:LINE]
    if code == 4:
        return (NO_GAIN if "no gain" in (out + err).lower() else REFUSED), last[:LINE]
    if code == 2 and ("--model" in last or "--trust-code" in last):
        return CODE, last[:LINE]
    return (
        FAILED if code == 1 or "Traceback" in err else REFUSED
    ), f"exit {code}: {last.replace(f'{cache_folder()}/files/', '')}"[:LINE]


def _judge(entry: PublishedFile, row: Row, folder: Path) -> None:
    """Measure a published artifact, in processes of their own."""
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    row.verdict, row.backend, row.bytes = report["verdict"], report["backend"], report["size"]
    try:
        peak, seconds = apart(fresh_process, str(folder))
        found: Measured = apart(measure, entry.name, str(folder))
    except (EngineCrashed, RuntimeError) as error:
        row.why = str(error)[:LINE]
        row.claims = [Claim("opens and runs", "yes", row.why, holds=False)]
        return
    row.claims = [*found.claims, *claims.memory_claims(report, peak, seconds)]
    row.original_task, row.task, row.error = found.original_task, found.task, found.error
    row.real, row.why = found.real, found.why
    if row.task is not None and row.original_task is not None:
        lost = row.original_task - row.task
        said, got = f"{row.original_task:.3f}", f"{row.task:.3f}"
        row.claims.append(Claim(f"task: {row.measure}", said, got, holds=lost <= LOSS))


def bars(rows: Sequence[Row]) -> list[Bar]:
    """Return the bars of the whole list."""
    first = [row for row in rows if row.command == "first" and not row.code and row.outcome != ABSENT]
    eight = [row for row in rows if row.command == "int8" and not row.code and row.outcome != ABSENT]
    published = [row for row in rows if row.outcome == PUBLISHED and row.claims]
    refused = [row for row in rows if row.outcome == NO_GAIN]
    onnx = [row for row in eight if named(row.name).path.endswith(".onnx")]

    def share(work: str, need: float, good: Sequence[Row], all_: Sequence[Row]) -> Bar:
        got = len(good) / len(all_) if all_ else None
        return Bar(work=f"{work}: {len(good)} of {len(all_)}", rival="", need=need, got=got, unit="of them",
                   why="no row")  # fmt: skip

    return [
        share("first command gives an artifact or no gain", 24 / 26, [r for r in first if r.outcome in ANSWERS], first),
        share("verdicts whose every number is true", 1, [r for r in published if not r.untrue], published),
        share("ONNX int8 better than onnxruntime", 2 / 3, [r for r in onnx if r.is_better], onnx),
        share("no gain said within 15 s", 1, [r for r in refused if r.seconds <= ANSWER_SECONDS], refused),
        share("no crash, no missing answer", 1, [r for r in rows if r.outcome not in (FAILED, LATE)], rows),
    ]  # fmt: skip


HEAD = "| file | command | outcome | s | MB | ÷ original time at 1, 8 | task: original, artifact | error | untrue |"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table, then what was said and is untrue, then the bars."""
    lines = [HEAD, "|---|---|---|--:|--:|---|---|--:|--:|", *map(line_of, rows)]
    return "\n".join(lines) + "\n\n" + _details(rows) + table(bars(rows))


def line_of(row: Row) -> str:
    """Return the line of a row in the table."""
    size = f"{row.source_bytes / 1e6:.3g}" + (f" → {row.bytes / 1e6:.3g}" if row.bytes else "")
    ratios = ", ".join(f"{one.ratio:.2f}" for one in row.real)
    task = "" if row.task is None else f"{row.measure} {row.original_task:.3f}, {row.task:.3f}"
    error = "" if row.error is None else f"{row.error:.1g}"
    untrue = f"{len(row.untrue)} of {len(row.claims)}" if row.claims else ""
    made = f"{row.outcome}, {row.backend}" if row.backend else row.outcome
    cells = (row.name, row.command, made, f"{row.seconds:.0f}", size, ratios, task, error, untrue)
    return f"| {' | '.join(cells)} |"


def _details(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        about = row.untrue if row.outcome == PUBLISHED else [row.said]
        lines += [f"- {row.name}, {row.command}: {line}" for line in about if line]
    return "\n".join(line.replace("|", "/") for line in lines) + "\n\n" if lines else ""


def matches(entry: PublishedFile, only: str) -> bool:
    """Return True if one of the words, parted by commas, is in the name, the kind or the wheel."""
    about = f"{entry.name} {entry.kind} {entry.wheel}".lower()
    return any(word.strip().lower() in about for word in only.split(","))


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="words of names, kinds or wheels, parted by commas")
    parser.add_argument("--quant", choices=list(COMMANDS), help="one of the two commands")
    parser.add_argument("--resume", action="store_true", help="only rows that today's file lacks")
    parser.add_argument("--render", action="store_true", help="run nothing, write the table again")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds of one command")
    arguments = parser.parse_args()
    order = [(entry.name, command) for entry in FILES for command in COMMANDS]
    table_rows = TodaysRows("real", Row, markdown, order=lambda row: order.index(row.key), threads=THREADS)
    known = table_rows.keep([])
    asked = [(entry, command) for entry in FILES if matches(entry, arguments.only) for command in COMMANDS
             if arguments.quant in (None, command)]  # fmt: skip
    wanted = [
        (entry, command)
        for entry, command in asked
        if not arguments.render
        and not (arguments.resume and (entry.name, command) in {row.key for row in known})
    ]
    if not asked:
        parser.error(f"no file has {arguments.only!r}. Known: {', '.join(entry.name for entry in FILES)}")
    for entry in FILES:
        if any(entry is one for one, _ in wanted):
            try:
                unzipped(entry.wheel)
            except WheelError as error:
                print(error, file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="real-") as work:
        for entry, command in wanted:
            row = run_file(entry, command, Path(work), arguments.timeout)
            print(line_of(row), *row.untrue, sep="\n    ", flush=True)
            known = table_rows.keep([row])
    results_page.write()
    print("\n" + table(bars(known)))
    print(f"written: {table_rows.path.relative_to(ROOT)}, {len(known)} rows; wheels are in {cache_folder()}")
    return 0 if all(bar.is_met for bar in bars(known)) else 1


if __name__ == "__main__":
    sys.exit(main())
