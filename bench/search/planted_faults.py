"""A trial that crashes, and one whose outputs are wrong, planted in our search and in Olive's.

    python -m bench.search.planted_faults [--olive .olive/bin/python]

Each tool searches the digits classifier twice, with one thing that it tries replaced: by code that ends its process
with SIGSEGV, and by a form whose outputs are twice the right ones. Ours is a backend beside plain torch, Olive's the
quantization pass of its workflow. Printed are the exit code and what was published, with its error. Exit code 1 where
our search did not end with a right artifact.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from bench.search import rivals
from bench.search.comparison import WORK, measured
from bench.search.sources import arguments
from bench.serve.reporting import exit_code, write_results
from bench.shared.repository import ROOT, module_command
from infer.report import inspection
from tests.support import planted_backends

FAULTS = {
    "crash": "segfault",
    "wrong": "wrong",
}  # the fault as Olive's script takes it, and our planted backend
LIMIT = 0.01  # relative error of a right float artifact


def main() -> int:
    """Run both tools, print the table and return 1 where our search published something wrong, or nothing."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--olive", default="", help="Python of an environment with olive-ai")
    asked = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)  # for the logs of `measured`
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        rows = [ours(fault, work) for fault in FAULTS]
        rows += olive(asked.olive, work) if asked.olive else []
    lines = ["| tool | fault | exit code | trial | published | its error | wall |", "|" + "---|" * 7]
    for row in rows:
        error = "-" if row["error"] is None else f"{row['error']:.2g}"
        cells = (
            row["tool"],
            row["fault"],
            row["code"],
            row["trial"],
            row["published"],
            error,
            f"{row['wall']:.0f} s",
        )
        lines.append(f"| {' | '.join(map(str, cells))} |")
    write_results("search-faults", {"rows": rows}, "\n".join(lines))
    bad = [
        row
        for row in rows
        if row["tool"] == "infer" and not (row["error"] is not None and row["error"] < LIMIT)
    ]
    return exit_code([f"{row['fault']}: {row['said']}" for row in bad])


def ours(fault: str, work: Path) -> dict[str, Any]:
    """Search with a planted backend beside plain torch."""
    site = planted_backends.install(work / f"site-{fault}")
    output = work / f"{fault}.infer"
    words = [*arguments("digits", work), "--for", "latency", "--fresh", "--force", "-o", str(output)]
    words += ["--space", f"backend=eager,{FAULTS[fault]}", "--space", "quant=none,int8"]
    ran = measured(
        f"digits: {fault}", module_command("infer", "optimize", *words), PYTHONPATH=f"{ROOT}:{site}"
    )
    row = {"tool": "infer", "fault": fault, "trial": "-", "published": "nothing", "error": None, **ran}
    if ran["code"]:
        return row
    record = inspection.report(output).search
    if record is None:
        raise SystemExit(f"{output} has no record of a search")
    best = next(trial for trial in record.trials if trial.chosen)
    planted = [t.outcome for t in record.trials if t.candidate.backend == FAULTS[fault]]
    found = None if best.measured is None else best.measured.error
    return row | {"trial": ", ".join(planted), "published": best.candidate.label, "error": found}


def olive(python: str, work: Path) -> list[dict[str, Any]]:
    """Search with Olive, its quantization pass planted."""
    source, failed = rivals.float_graph("digits", arguments("digits", work), work, measured)
    if source is None:
        raise SystemExit(f"no ONNX graph for Olive: {failed['said']}")
    inputs = load_file(work / "digits-float.infer" / "golden" / "inputs.safetensors")
    rows = []
    for fault in FAULTS:
        ran, found = rivals.searched("digits", source, python, work, measured, fault)
        row = {"tool": "Olive", "fault": fault, "trial": "-", "published": "nothing", "error": None, **ran}
        if found is not None:
            is_input = Path(found["model"]).resolve() == source.resolve()
            published = "the model that was given" if is_input else "the planted model"
            row |= {"published": published, "error": rivals.error_of(Path(found["model"]), source, inputs)}
        rows.append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())
