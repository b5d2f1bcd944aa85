"""Cost of a worker process: our server with the model in a worker against our server with the model in it.

    python -m bench.serve.process_hop [ARTIFACT.infer] [--clients 1,32] [--seconds 1] [--rounds 7]

Paired: within a round both servers get the same requests one after the other, the order turned each round; figures are
medians over rounds of differences and ratios within them. The no-op model shows the hop alone. "÷ model" is over the
model's best rate by itself at batch 1, 8 or `clients`, in the same round. The start is measured too: from the start of
the process to the first answer, and the phases that the server itself tells. Exit code 1 when a bar is missed: 0.2 ms
added at one client, 90 % of the model's own rate with the most clients.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from bench.serve.load_generator import load
from bench.serve.request_forms import KSERVE, answers, check, encode
from bench.serve.server_processes import NOOP, REQUESTS, model_alone, samples, started
from bench.serve.serving import serving
from bench.shared.command_line import parser_of
from bench.shared.example_models import artifact
from bench.shared.results import exit_code, progress, write_results

BAR_MS, BAR_SHARE = 0.2, 0.9


def middle(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def measure(artifact: str, arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    name = NOOP if artifact == NOOP else json.loads((Path(artifact) / "manifest.json").read_text())["name"]
    requests = [encode(name, one)["binary"] for one in samples(artifact, REQUESTS)]
    rows: dict[str, Any] = {}
    with ExitStack() as stack:
        servers = {role: stack.enter_context(started(role, artifact)) for role in ("infer", "embedded")}
        model = stack.enter_context(model_alone(artifact))
        for port, _ in servers.values():
            check(port, "binary", requests, model.call("expected"))
        for clients in arguments.clients:
            taken: list[dict[str, Any]] = []
            for number in range(arguments.rounds + 1):
                progress(f"{name}  {clients} clients  round {number}")
                one: dict[str, Any] = {}
                for role, (port, running) in list(servers.items())[:: 1 if number % 2 else -1]:
                    one[role] = load(port, requests, clients, seconds=arguments.seconds, pid=running.pid)
                one["model"] = max(model.call("rate", size, 0.4) for size in {1, 8, clients})
                taken.append(one)
            rows[str(clients)] = summary(taken[1:])  # the first round warms up
    return {"model": name, "clients": rows}


def summary(taken: list[dict[str, Any]]) -> dict[str, float]:
    return {
        "rate": middle([one["infer"]["rate"] for one in taken]),
        "rate_in_process": middle([one["embedded"]["rate"] for one in taken]),
        "p50_ms": middle([one["infer"]["p50_ms"] for one in taken]),
        "p99_ms": middle([one["infer"]["p99_ms"] for one in taken]),
        "added_ms": middle([one["infer"]["p50_ms"] - one["embedded"]["p50_ms"] for one in taken]),
        "ratio": middle([one["infer"]["rate"] / one["embedded"]["rate"] for one in taken]),
        "share_of_model": middle([one["infer"]["rate"] / one["model"] for one in taken]),
        "cpu_ms": middle([one["infer"]["cpu_ms"] for one in taken]),
        "cpu_ms_in_process": middle([one["embedded"]["cpu_ms"] for one in taken]),
    }


def cold(artifact: str, rounds: int) -> dict[str, Any]:
    """Return seconds from process start to first answer, and the line of phases of the median round."""
    name = json.loads((Path(artifact) / "manifest.json").read_text())["name"]
    request = [encode(name, one)["binary"] for one in samples(artifact, 1)]
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        with serving([sys.executable, "serve.py", artifact, "--port", "0", "--timings"]) as (port, running):
            assert running.stdout is not None
            line = running.stdout.readline().strip()
            answers(port, request, KSERVE["binary"])
            taken.append((time.perf_counter() - began, line))
    seconds, line = sorted(taken)[len(taken) // 2]
    return {"first_answer_seconds": round(seconds, 2), "phases": line}


def markdown(tables: list[dict[str, Any]], start: dict[str, Any]) -> str:
    lines = [
        "| model | clients | req/s | in process | ratio | p50 ms | p99 ms | ms added at p50 | ÷ model | CPU ms |",
        "|" + "---|" * 10,
    ]
    for table in tables:
        for clients, row in table["clients"].items():
            share = "" if table["model"] == NOOP else f"{row['share_of_model']:.2f}"
            cells = [table["model"], clients, f"{row['rate']:.0f}", f"{row['rate_in_process']:.0f}"]
            cells += [f"{row['ratio']:.2f}", f"{row['p50_ms']:.2f}", f"{row['p99_ms']:.2f}"]
            cells += [
                f"{row['added_ms']:+.3f}",
                share,
                f"{row['cpu_ms']:.2f} ({row['cpu_ms_in_process']:.2f})",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", *cold_table(start), ""])


def cold_table(start: dict[str, Any]) -> list[str]:
    """Return the table of process start to first answer, phase by phase as the server reports them."""
    first, ready = start["first_answer_seconds"], re.search(r"after ([\d.]+) s", start["phases"])
    rows = re.findall(r"([\w-]+) ([\d.]+)(?=[,) ]|$)", start["phases"].partition(":")[2])
    outer = "of which server", "of which models"
    lines = ["| cold start, MiniLM | s |", "|---|---|"]
    lines += [
        f"| {outer[i] if i < len(outer) else '… ' + name} | {value} |" for i, (name, value) in enumerate(rows)
    ]
    if ready:
        lines.insert(2, f"| process start to ready | {ready[1]} |")
        lines.append(f"| ready to first answer | {first - float(ready[1]):.2f} |")
    return [*lines, f"| process start to first answer | {first} |"]


def missed(tables: list[dict[str, Any]]) -> list[str]:
    said = []
    for table in tables:
        rows = table["clients"]
        if "1" in rows and rows["1"]["added_ms"] > BAR_MS:
            said.append(f"{table['model']}: a worker adds {rows['1']['added_ms']} ms, the bar is {BAR_MS}")
        most = rows[max(rows, key=int)]
        if table["model"] != NOOP and most["share_of_model"] < BAR_SHARE:
            said.append(
                f"{table['model']}: {most['share_of_model']} of the model's rate, the bar is {BAR_SHARE}"
            )
    return said


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--clients", type=lambda text: list(map(int, text.split(","))), default=[1, 32])
    parser.add_argument("--seconds", type=float, default=1.0, help="of one run of one server")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.artifact or artifact("minilm", folder)
        tables = [measure(name, arguments, progress) for name in (NOOP, path)]
        start = cold(path, 3)
    write_results("serve-hop", {"tables": tables, "start": start}, markdown(tables, start))
    return exit_code(missed(tables))


if __name__ == "__main__":
    sys.exit(main())
