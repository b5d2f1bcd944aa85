"""Memory and time of opening and of quantizing a checkpoint: torch.load against the ways of `infer`.

    python -m bench.load.checkpoint_open          Llama-3.2-1B: 1.24 B random float32 weights, 10 GB of disk for a while
    python -m bench.load.checkpoint_open --small  100 M weights

Every row is a fresh process on the same weights, files in the page cache, imports not timed. `peak` is VmHWM,
nothing subtracted; `own` is the largest anonymous part seen (sampled each 10 ms), which mapped files don't enter.
A row counts only when chosen layers give the bytes that the others give. Exits 1 when a row differs, or when
quantizing needs more memory than the bar.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.shared.llama_checkpoint import LLAMA_1B, LLAMA_100M, make_checkpoint
from bench.shared.repository import child_environment, module_command
from bench.shared.results import result_path

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
    options = parse()
    shape = LLAMA_100M if options.small else LLAMA_1B
    with work_folder(options.folder) as folder:
        num_weights = make_checkpoint(folder / "model", shape)
        rows = [run_row(name, folder) for name in options.rows.split(",")]
    rows = merged(rows, num_weights, small=options.small)
    verdict = judge(rows, small=options.small)
    report(rows, num_weights, verdict, small=options.small)
    return 0 if all(ok for ok, _ in verdict) else 1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="100 M weights instead of 1.24 B")
    parser.add_argument("--folder", help="where the temporary files go (default: a temporary folder)")
    parser.add_argument(
        "--rows", default=",".join(ROWS), help="which rows, separated by commas; the others of today stay"
    )
    return parser.parse_args()


@contextmanager
def work_folder(given: str | None) -> Iterator[Path]:
    if given:
        Path(given).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="infer-bench-load.", dir=given))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_row(name: str, folder: Path) -> dict[str, Any]:
    """Run one child on warm files; what it leaves on disk is removed."""
    if name not in ROWS:
        raise SystemExit(f"no row named {name!r}. Known: {', '.join(ROWS)}")
    if name == "torch":
        run_child("write-pt", folder)
    warm(folder / "model.pt" if name == "torch" else folder / "model")
    begin = time.perf_counter()
    found = run_child(name, folder)
    for left in ("model.pt", "packed.safetensors"):
        (folder / left).unlink(missing_ok=True)
    shutil.rmtree(folder / "cache", ignore_errors=True)
    row = {"row": name, "process_s": time.perf_counter() - begin, "load_average": os.getloadavg()[0], **found}
    said = f"{LABELS[name]}: peak {row['peak_gb']:.2f} GB, own {row['own_gb']:.2f} GB, {row.get('load_s', 0):.1f} s"
    print(said, flush=True)
    return row


def run_child(name: str, folder: Path) -> dict[str, Any]:
    command = module_command("bench.load.checkpoint_open_worker", name, str(folder))
    environment = child_environment(INFER_CACHE=str(folder / "cache"), HF_HUB_OFFLINE="1")
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"the row {name} failed with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def warm(path: Path) -> None:
    buffer = bytearray(1 << 24)
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb", buffering=0) as handle:
            while handle.readinto(buffer):
                pass


def kept_at(*, small: bool) -> Path:
    return result_path("load-small" if small else "load")


def merged(rows: list[dict[str, Any]], num_weights: int, *, small: bool) -> list[dict[str, Any]]:
    """Return the rows measured now in place of today's earlier ones; the seeded weights are equal."""
    path = kept_at(small=small)
    earlier = json.loads(path.read_text()) if path.is_file() else {"num_weights": num_weights, "rows": []}
    if earlier["num_weights"] != num_weights:
        return rows
    found = {row["row"]: row for row in [*earlier["rows"], *rows]}
    return [found[name] for name in ROWS if name in found]


def judge(rows: list[dict[str, Any]], *, small: bool) -> list[tuple[bool, str]]:
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


def report(
    rows: list[dict[str, Any]], num_weights: int, verdict: list[tuple[bool, str]], *, small: bool
) -> None:
    """Print the table; write JSON and Markdown into bench/results."""
    from rich.console import Console
    from rich.table import Table

    title = f"{num_weights / 1e9:.2f} B float32 weights, {num_weights * 4 / 1e9:.2f} GB"
    head = ["way", "seconds", "peak GB", "own GB", "forward s", "peak GB after", "own GB after"]
    keys = ["load_s", "peak_gb", "own_gb", "forward_s", "forward_peak_gb", "forward_own_gb"]
    lines = [[LABELS[r["row"]], *(f"{r[k]:.2f}" if k in r else "-" for k in keys)] for r in rows]
    table = Table(title=title)
    for i, name in enumerate(head):
        table.add_column(name, justify="left" if i == 0 else "right")
    for line in lines:
        table.add_row(*line)
    console = Console()
    console.print(table)
    for ok, text in verdict:
        console.print(f"{'ok  ' if ok else 'FAIL'} {text}", highlight=False)
    versions = about()
    path = kept_at(small=small)
    record = {"about": versions, "num_weights": num_weights, "rows": rows, "verdict": verdict}
    path.write_text(json.dumps(record, indent=1) + "\n")
    table_md = [head, ["---"] + ["---:"] * (len(head) - 1), *lines]
    text = "\n".join("| " + " | ".join(line) + " |" for line in table_md)
    said = "\n".join(f"- {'ok' if ok else '**FAIL**'}: {line}" for ok, line in verdict)
    about_md = ", ".join(f"{key} {value}" for key, value in versions.items())
    note = "`peak` is VmHWM; `own` the largest anonymous part. Files were in the page cache."
    path.with_suffix(".md").write_text(f"# Loading {title}\n\n{about_md}\n\n{text}\n\n{note}\n\n{said}\n")


def about() -> dict[str, str]:
    import safetensors
    import torch
    import transformers

    cpu = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.processor(),
    )
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="minutes"),
        "cpu": f"{cpu}, {os.cpu_count()} threads",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "safetensors": safetensors.__version__,
    }


if __name__ == "__main__":
    sys.exit(main())
