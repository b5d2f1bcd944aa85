"""`infer serve` against a naive FastAPI endpoint of the same model, and against the model alone.

    python -m bench.serve.fastapi_comparison [ARTIFACT.infer] [--clients 1,8,32] [--requests 300] [--rounds 5]

Every server and the bare model run in a process of their own; this process is the client, on 127.0.0.1 only. Answers
are compared with the Predictor's before anything is timed. Runs are interleaved; figures are medians over rounds, and
ratios are taken round by round. The naive endpoint is what people write first: `def`, JSON lists, no batching. Without
an artifact, MiniLM is made first. Client and server share the machine's cores, for both sides alike, and OpenMP waits
without spinning, for all alike. "÷ model alone" is the binary form over the model's best rate at batch 1, 8 or
`clients`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.closed_loop_client import check, encode, timed
from bench.serve.reporting import parse_arguments, progress, write_results
from bench.serve.server_processes import NOOP, ask, make_minilm, samples, started


def measure(artifact: str, arguments: argparse.Namespace, progress: Callable[[str], None]) -> dict[str, Any]:
    """Measure medians and round-by-round ratios of one model at each number of clients."""
    name = NOOP if artifact == NOOP else json.loads((Path(artifact) / "manifest.json").read_text())["name"]
    encoded = [encode(name, one) for one in samples(artifact, 64)]
    forms = {form: [one[form] for one in encoded] for form in ("json", "binary", "naive")}
    table: dict[str, Any] = {
        "model": name,
        "requests": arguments.requests,
        "rounds": arguments.rounds,
        "clients": {},
    }
    with ExitStack() as stack, tempfile.TemporaryDirectory() as work:
        ours = stack.enter_context(started("infer", artifact))
        embedded = stack.enter_context(started("embedded", artifact))
        naive = stack.enter_context(started("naive", artifact))
        bare = stack.enter_context(started("bare", artifact))
        _, model = stack.enter_context(started("model", artifact))
        ask(model, save=f"{work}/expected.npy")
        expected = np.load(f"{work}/expected.npy")
        servers = {"json": ours, "binary": ours, "embedded": embedded, "naive": naive, "bare": bare}
        forms["bare"], forms["embedded"] = forms["json"], forms["binary"]
        for form in ("json", "binary", "naive"):
            check(servers[form][0], form, forms[form], expected)
        check(embedded[0], "binary", forms["binary"], expected)
        count = arguments.requests * (8 if artifact == NOOP else 1)
        for clients in arguments.clients:
            runs: dict[str, list[dict[str, float]]] = {}
            for number in range(arguments.rounds + 1):
                progress(f"{name}  {clients} clients  round {number}")
                batch = max(clients, 1)
                alone = max(ask(model, batch=b, seconds=0.5)["rate"] for b in {1, 8, batch})
                here = {f: timed(server, forms[f], clients, count) for f, server in servers.items()}
                here["model"] = {"rate": alone, "p50_ms": 1e3 / alone, "p99_ms": 1e3 / alone, "cpu_ms": 0.0}
                if number:  # the first round warms up
                    for form, figures in here.items():
                        runs.setdefault(form, []).append(figures)
            table["clients"][str(clients)] = summary(runs)
    return table


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    def middle(values: Iterator[float]) -> float:
        return round(statistics.median(values), 4)

    result: dict[str, Any] = {
        form: {key: middle(one[key] for one in rounds) for key in rounds[0]} for form, rounds in runs.items()
    }

    def ratio(a: str, b: str) -> float:
        return middle(x["rate"] / y["rate"] for x, y in zip(runs[a], runs[b], strict=True))

    def added(a: str, b: str) -> float:
        return middle(x["p50_ms"] - y["p50_ms"] for x, y in zip(runs[a], runs[b], strict=True))

    result["json_over_naive"], result["binary_over_naive"] = ratio("json", "naive"), ratio("binary", "naive")
    result["binary_over_model"] = ratio("binary", "model")
    result["worker_over_embedded"], result["hop_ms"] = (
        ratio("binary", "embedded"),
        added("binary", "embedded"),
    )
    result["added_ms_over_bare"] = {form: added(form, "bare") for form in ("json", "binary", "naive")}
    result["added_ms_over_model"] = {form: added(form, "model") for form in ("json", "binary", "naive")}
    return result


def markdown(tables: list[dict[str, Any]]) -> str:
    lines = [
        "| model | clients | infer JSON, req/s | infer binary, req/s | naive FastAPI, req/s | ÷ naive (JSON, binary) "
        "| ÷ model alone | p50 ms (JSON, binary, naive) | p99 ms | added to bare HTTP, ms "
        "| worker process: ms added, rate ÷ in-process | CPU ms/request (JSON, binary, in-process, naive, bare) |",
        "|" + "---|" * 12,
    ]
    for table in tables:
        for clients, row in table["clients"].items():
            rates = [f"{row[form]['rate']:.0f}" for form in ("json", "binary", "naive")]
            p50, p99 = (
                ", ".join(f"{row[f][p]:.2f}" for f in ("json", "binary", "naive"))
                for p in ("p50_ms", "p99_ms")
            )
            added = ", ".join(f"{value:.2f}" for value in row["added_ms_over_bare"].values())
            over = f"{row['json_over_naive']:.2f}, {row['binary_over_naive']:.2f}"
            part = "" if table["model"] == NOOP else f"{row['binary_over_model']:.2f}"
            hop = f"{row['hop_ms']:+.3f}, {row['worker_over_embedded']:.2f}"
            kinds = ("json", "binary", "embedded", "naive", "bare")
            cpu = ", ".join(f"{row[f]['cpu_ms']:.2f}" for f in kinds)
            lines.append(
                f"| {' | '.join([table['model'], clients, *rates, over, part, p50, p99, added, hop, cpu])} |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    arguments = parse_arguments(__doc__, [1, 8, 32], 5)
    with tempfile.TemporaryDirectory() as folder:
        artifact = arguments.artifact or make_minilm(folder, progress)
        tables = [measure(NOOP, arguments, progress), measure(artifact, arguments, progress)]
    write_results("serve", {"tables": tables}, markdown(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
