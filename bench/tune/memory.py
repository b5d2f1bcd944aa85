"""Peak memory and time of a training step by technique, on two Llama shapes, and QLoRA against peft and bitsandbytes.

    python -m bench.tune.memory [--shape 135M,1B] [--only 'nf4*'] [--fresh] [--packages FOLDER]

Each row opens the model in a process of its own, plans the step, and runs it: of 135M twice, the second is timed. Times
are CPU seconds of all threads, which other work on the machine changes least. A row that was
measured today with these sources is kept, so that an interrupted run goes on. The rival needs bitsandbytes, which
`pip install --no-deps --target FOLDER bitsandbytes` puts beside the installation. Peaks are those of the whole process,
interpreter and opening included. Writes bench/results/tune-memory-DATE-CPU.json and .md; exits 1 when the bar is
missed: 3 GB for QLoRA of the 1B shape at rank 16, 512 tokens and micro-batch 1.
"""

from __future__ import annotations

import fnmatch
import json
import sys
from pathlib import Path
from typing import Any

from bench.llm.decoder_shapes import SHAPES
from bench.shared.child_process import ChildProcess
from bench.shared.command_line import parser_of
from bench.shared.results import TodaysRows
from bench.shared.training_step import LENGTH, RANK, OurStep, RivalStep, packages_of

NAME, BAR, RIVAL = "tune-memory", 3e9, "peft + bitsandbytes nf4, checkpointing, bfloat16"
BEST: dict[str, Any] = {"checkpointing": True, "precision": "bfloat16"}
PACKED: dict[str, dict[str, Any]] = {
    "nf4, whole logits": {"whole_logits": True},
    "nf4": {},
    "nf4, decoded forward": {"forward": "decoded"},
    "nf4, checkpointing": {"checkpointing": True},
    "nf4, bfloat16": {"precision": "bfloat16"},
    "nf4, checkpointing, bfloat16": BEST,
    "nf4, checkpointing, bfloat16, whole logits": {**BEST, "whole_logits": True},
}
SMALL: dict[str, dict[str, Any]] = {
    "all weights trained, adamw": {"base": "none", "full": True},
    "all weights trained, muon": {"base": "none", "full": True, "optimizer": "muon"},
    "all weights trained, adamw8bit": {"base": "none", "full": True, "optimizer": "adamw8bit"},
    "float32 base, whole logits": {"base": "none", "whole_logits": True},
    "float32 base": {"base": "none"},
    "float32 base, checkpointing": {"base": "none", "checkpointing": True},
    **PACKED,
    "nf4, 4 rows": {"rows": 4},
    "nf4, 4 rows, checkpointing": {"rows": 4, "checkpointing": True},
}
WORKS = {"135M": SMALL, "1B": PACKED}


def measure(shape: str, name: str, threads: int, packages: Path) -> dict[str, Any]:
    """Return what a row measures, or why there is none."""
    folder = str(SHAPES[shape].checkpoint)
    try:
        if name == RIVAL:
            if why := packages_of(packages):
                return {"why": why}
            child = ChildProcess(RivalStep, folder, threads, str(packages))
        else:
            child = ChildProcess(_ours, folder, threads, WORKS[shape][name])
    except RuntimeError as error:
        return {"why": str(error)}
    try:
        planned = None if name == RIVAL else child.call("plan")
        first = child.call("step")
        second = child.call("step") if shape == "135M" else first
    except RuntimeError as error:
        return {"why": str(error)}
    finally:
        child.close()
    return {**second, "first": first, "planned": planned}


def _ours(folder: str, threads: int, options: dict[str, Any]) -> OurStep:
    return OurStep(folder, threads, **options)


def names_of(shape: str) -> list[str]:
    """Return the rows of a shape, the rival last."""
    return [*WORKS[shape], RIVAL]


def page(rows: list[dict[str, Any]]) -> str:
    """Return the tables of all shapes."""
    return "".join(table({row["name"]: row for row in rows}, shape) for shape in WORKS)


def table(rows: dict[str, dict[str, Any]], shape: str) -> str:
    """Return Markdown with a row for each technique; times are relative to that of plain nf4."""
    head = [
        "| technique | planned MB | peak MB | of the step alone | time | loss before, after |",
        "|" + "---|" * 6,
    ]
    lines, plain = [], rows.get(f"{shape} nf4", {}).get("seconds")
    for name in names_of(shape):
        row = rows.get(f"{shape} {name}")
        if row is None:
            continue
        if "why" in row:
            lines.append(f"| {name} | {row['why']} | | | | |")
            continue
        planned = "" if row["planned"] is None else f"{row['planned'] / 1e6:.0f}"
        peaks = f"{row['process peak'] / 1e6:.0f} | {row['peak'] / 1e6:.0f}"
        time = f"{row['seconds'] / plain:.2f} ×" if plain else f"{row['seconds']:.1f} s"
        lines.append(
            f"| {name} | {planned} | {peaks} | {time} | {row['first']['loss']:.4f}, {row['loss']:.4f} |"
        )
    return "\n".join([f"\n{shape}, rank {RANK}, {LENGTH} tokens:\n", *head, *lines, ""])


def bar_missed(rows: dict[str, dict[str, Any]]) -> str | None:
    """Say how the bar was missed, None where it was met or not measured."""
    row = rows.get("1B nf4, checkpointing, bfloat16")
    if row is None:
        return None
    peak = row.get("process peak")
    return None if peak is not None and peak <= BAR else f"1B QLoRA: {peak or row['why']}, allowed {BAR:.0f}"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="135M,1B", help="shapes, of 135M and 1B")
    parser.add_argument("--only", default="*", help="rows, by a pattern of their names")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--packages", type=Path, default=Path(".work/rivals"), help="folder with bitsandbytes"
    )
    parser.add_argument("--fresh", action="store_true", help="measure again what was measured today")
    given = parser.parse_args()
    rows = TodaysRows(NAME, dict, page, key=lambda row: row["name"], threads=given.threads)
    kept = {row["name"]: row for row in rows.read()}
    for shape in given.shape.split(","):
        for name in names_of(shape):
            key = f"{shape} {name}"
            done = key in kept and "why" not in kept[key] and not given.fresh
            if done or not fnmatch.fnmatch(name, given.only):
                continue
            print(key, end=": ", flush=True)
            kept[key] = {"name": key, **measure(shape, name, given.threads, given.packages)}
            print(json.dumps(kept[key]), flush=True)
            rows.keep([kept[key]])
    missed = bar_missed(kept)
    print(page(list(kept.values())), missed or "", sep="\n")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
