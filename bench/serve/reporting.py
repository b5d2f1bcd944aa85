"""Command line, progress lines and result files that the server benchmarks share."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

from bench.shared.repository import ROOT
from bench.shared.results import machine_header, result_path


def progress(text: str) -> None:
    """Print one line on stderr."""
    print(text, file=sys.stderr, flush=True)


def parse_arguments(description: str | None, clients: list[int], rounds: int) -> argparse.Namespace:
    """Parse the command line that the server benchmarks have in common."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact", nargs="?")
    parser.add_argument(
        "--clients", type=lambda text: [int(part) for part in text.split(",")], default=clients
    )
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser.parse_args()


def write_results(name: str, found: dict[str, Any], table: str) -> None:
    """Write bench/results/NAME-DATE-CPU.json and .md with machine, versions and load, and print the table."""
    head = {**machine_header(), "load": round(os.getloadavg()[1], 1)}
    path = result_path(name)
    path.write_text(json.dumps({**head, **found}, indent=1) + "\n")
    note = f"{head['machine']['cpu']}; client, servers and model share its cores; "
    note += f"load average {head['load']}; {head['date']}\n\n"
    path.with_suffix(".md").write_text(note + table)
    print(note + table)
    print(f"written: {path.relative_to(ROOT)}")


def exit_code(missed: list[str]) -> int:
    """Print the bars that were missed and return the exit code: 1 if there are any."""
    for line in missed:
        print(f"missed: {line}")
    return 1 if missed else 0
