"""Memory and time of opening and of quantizing a checkpoint: torch.load against the ways of `infer`.

    python -m bench.load.checkpoint_open          Llama-3.2-1B: 1.24 B random float32 weights, 10 GB of disk for a while
    python -m bench.load.checkpoint_open --small  100 M weights

Every row is a fresh process on the same weights, files in the page cache, imports not timed. `peak` is VmHWM,
nothing subtracted; `own` is the largest anonymous part seen (sampled each 10 ms), which mapped files don't enter.
A row counts only when chosen layers give the bytes that the others give. Exits 1 when a row differs, or when
quantizing needs more memory than the bar.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.load.checkpoint_open_worker import run_row
from bench.shared.child_process import apart
from bench.shared.command_line import parser_of
from bench.shared.llama_checkpoint import LLAMA_1B, LLAMA_100M, make_checkpoint
from bench.shared.results import TodaysRows

BAR_GB, BAR_S = 1.5, 600
QUANTS = ("nf4", "cluster:4")
ROWS = ("imports", "torch", "meta", "offload", *QUANTS)
LABELS = {
    "imports": "imports only",
    "torch": "torch.load + load_state_dict",
    "meta": "meta + mapped file",
    "offload": "offload (rows on demand)",
    "nf4": "quantize to nf4, streaming, write",
    "cluster:4": "quantize to cluster:4, streaming, write",
}


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--small", action="store_true", help="100 M weights instead of 1.24 B")
    parser.add_argument("--folder", help="where the temporary files go (default: a temporary folder)")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="separated by commas; the others of today stay"
    )
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := set(wanted) - set(ROWS):
        parser.error(f"no row named {', '.join(sorted(unknown))}. Known: {', '.join(ROWS)}")
    with work_folder(options.folder) as folder:
        num_weights = make_checkpoint(folder / "model", LLAMA_100M if options.small else LLAMA_1B)
        rows = TodaysRows(
            "load-small" if options.small else "load", dict,
            lambda rows: page(rows, num_weights, small=options.small),
            key=lambda row: row["row"], order=lambda row: ROWS.index(row["row"]), num_weights=num_weights,
        )  # fmt: skip
        for name in wanted:
            known = rows.keep([measure(name, folder)])
    print(page(known, num_weights, small=options.small))
    return 0 if all(ok for ok, _ in judge(known, small=options.small)) else 1


@contextmanager
def work_folder(given: str | None) -> Iterator[Path]:
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="infer-bench-load.", dir=given))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(name: str, folder: Path) -> dict[str, Any]:
    """Run one row in a process of its own on warm files; what it leaves on disk is removed."""
    os.environ |= {"INFER_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    if name == "torch":
        apart(run_row, "write-pt", folder)
    warm(folder / "model.pt" if name == "torch" else folder / "model")
    begin = time.perf_counter()
    found = apart(run_row, name, folder)
    for left in ("model.pt", "packed.safetensors"):
        (folder / left).unlink(missing_ok=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return {
        "row": name,
        "process_s": time.perf_counter() - begin,
        "load_average": os.getloadavg()[0],
        **found,
    }


def warm(path: Path) -> None:
    buffer = bytearray(1 << 24)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def judge(rows: Sequence[dict[str, Any]], *, small: bool) -> list[tuple[bool, str]]:
    opened = [row for row in rows if "checksum" in row]
    sums = {row["checksum"] for row in opened}
    finite = all(row.get("finite", True) for row in rows)
    verdict = [
        (len(sums) <= 1 and finite, f"{len(sums)} checksum over {len(opened)} rows, outputs finite: {finite}")
    ]
    for row in rows:
        if row["row"] not in QUANTS:
            continue
        ok = row["same"] and row["error"] < 0.15
        verdict.append(
            (
                ok,
                f"the {row['row']} file equals the model: {row['same']}; relative rms error {row['error']:.3f}",
            )
        )
        bar = (
            f"quantizing to {row['row']} peaks at {row['peak_gb']:.2f} GB and takes {row['quantize_s']:.0f} s"
        )
        ok = small or (row["peak_gb"] <= BAR_GB and row["quantize_s"] <= BAR_S)
        verdict.append((ok, f"{bar}; the bar at 1.24 B weights is {BAR_GB} GB and {BAR_S} s"))
    return verdict


def page(rows: Sequence[dict[str, Any]], num_weights: int, *, small: bool) -> str:
    """Return the table, and a line for each bar."""
    head = ["way", "seconds", "peak GB", "own GB", "forward s", "peak GB after", "own GB after"]
    keys = ["load_s", "peak_gb", "own_gb", "forward_s", "forward_peak_gb", "forward_own_gb"]
    cells = [head, ["---"] + ["---:"] * len(keys)]
    cells += [[LABELS[r["row"]], *(f"{r[k]:.2f}" if k in r else "-" for k in keys)] for r in rows]
    note = f"{num_weights / 1e9:.2f} B float32 weights, {num_weights * 4 / 1e9:.2f} GB, files in the page cache; "
    note += "`peak` is VmHWM, `own` the largest anonymous part."
    lines = [note, "", *(f"| {' | '.join(row)} |" for row in cells), ""]
    lines += [f"- {'ok' if ok else '**FAIL**'}: {line}" for ok, line in judge(rows, small=small)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
