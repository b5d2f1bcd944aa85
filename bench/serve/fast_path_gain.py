"""Gain of the fast path: `infer serve` with it against `infer serve` without it, the same models, in turns.

    python -m bench.serve.fast_path_gain [--only mlp,digits] [--rounds 5] [--seconds 2]

The fast path (`infer/serve/fast_path`) answers requests whose head and body are like earlier ones without uvicorn's
parser and the ASGI app, and queues those of one loop iteration together. Four models at saturation: a no-op, an MLP of
16-64-64-1, the digits classifier (both float32 in ONNX Runtime), and MiniLM int8 on sentences of mixed lengths. On
Linux the servers have all CPUs but the last, which is the client's. Answers of both servers are compared before any
run is timed. Figures are medians over rounds, ratios are taken round by round. Exit code 1 when no model but the no-op
gains the 25 % that keep the fast path.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.load_generator import load
from bench.serve.request_forms import EMBED, KSERVE, answers, encode, largest_error
from bench.serve.server_processes import NOOP, model_alone, started
from bench.shared import example_models
from bench.shared.command_line import parser_of
from bench.shared.results import exit_code, progress, write_results

BAR = 1.25
CLIENTS = {NOOP: 64, "mlp": 64, "digits": 64, "minilm": 32}
ROWS = 64  # distinct requests
ROLES = {"on": "infer", "off": "ordinary"}
MLP = """import torch
from torch import nn


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
"""


def make(name: str, folder: str) -> str:
    """Make the artifact of a model in a folder; return its path."""
    if name == NOOP:
        return NOOP
    if name == "minilm":
        return example_models.artifact(name, folder, quant="int8", backend="eager")
    if name == "digits":
        return example_models.artifact(name, folder, backend="ort")
    import torch

    from infer import Plan, optimize

    source, code = Path(folder) / "mlp.pt", Path(folder) / "mlp.py"
    code.write_text(MLP)
    torch.save(runpy.run_path(str(code))["build"]().state_dict(), source)
    plan = Plan(
        source=str(source), model=f"{code}:build", backend="ort", allow_slower=True, data="random",
        inputs=("input=float32[batch,16]",),
    )  # fmt: skip
    return str(optimize(plan, Path(folder) / f"{name}.infer").path)


def requests_of(name: str, artifact: str) -> dict[str, list[bytes]]:
    """Return the encoded requests of a model by form: JSON and raw tensors, of MiniLM texts in JSON."""
    if name == "minilm":
        import minilm

        return {"json": [EMBED["infer"].request(text) for text in minilm.sentences()[:ROWS]]}
    specs = [{"name": "x", "shape": ["batch", 16]}]
    if artifact != NOOP:
        specs = json.loads((Path(artifact) / "manifest.json").read_text())["inputs"]
    random, found = np.random.default_rng(0), dict[str, list[bytes]]()
    for _ in range(ROWS):
        arrays = {s["name"]: random.random((1, *s["shape"][1:]), dtype=np.float32) for s in specs}
        encoded = encode(name, arrays)
        for form in ("json", "binary"):
            found.setdefault(form, []).append(encoded[form])
    return found


def compare_answers(ports: dict[str, int], form: str, requests: list[bytes]) -> None:
    """Refuse to time servers whose answers differ; the second time the fast path knows the requests."""
    read = KSERVE[form]
    want = answers(ports["off"], requests, read)
    for _ in range(2):
        error = largest_error(answers(ports["on"], requests, read), want)
        if not error < 1e-3:
            raise SystemExit(f"{form}: answers with and without the fast path differ by {error:.2e}")


def measure(name: str, artifact: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure one model: a row for each form of request."""
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []
    rows = []
    with ExitStack() as stack:
        if len(cpus) > 1:
            stack.callback(os.sched_setaffinity, 0, cpus)
            os.sched_setaffinity(0, cpus[:-1])
        seconds = alone(artifact)
        servers = {side: stack.enter_context(started(role, artifact)) for side, role in ROLES.items()}
        if len(cpus) > 1:
            os.sched_setaffinity(0, cpus[-1:])
        for form, requests in requests_of(name, artifact).items():
            compare_answers({side: port for side, (port, _) in servers.items()}, form, requests)
            runs: dict[str, list[dict[str, Any]]] = {"on": [], "off": []}
            for number in range(asked.rounds + 1):
                for side in ("on", "off") if number % 2 else ("off", "on"):
                    progress(f"{name} {form}  round {number}  fast path {side}")
                    port, running = servers[side]
                    took = asked.seconds if number else asked.seconds / 2
                    found = load(port, requests, CLIENTS[name], seconds=took, pid=running.pid)
                    if number:  # the first round warms up
                        runs[side].append(found)
            rows.append({"model": name, "form": form, "alone_us": round(1e6 * seconds, 1), **summary(runs)})
    return rows


def alone(artifact: str) -> float:
    """Return the median seconds of one call of the model in a process of its own."""
    if artifact == NOOP:
        return 0.0
    with model_alone(artifact) as model:
        return statistics.median(model.call("seconds"))


def summary(runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return medians of each side and the ratios of rates, with and without the fast path, of each round."""
    ratios = [on["rate"] / max(off["rate"], 1e-9) for on, off in zip(runs["on"], runs["off"], strict=True)]
    found: dict[str, Any] = {
        side: {
            key: round(statistics.median(one[key] for one in some), 4)
            for key in ("rate", "p50_ms", "p99_ms", "cpu_ms")
        }
        for side, some in runs.items()
    }
    for side, some in runs.items():
        found[side]["refused"] = sum(
            count for one in some for status, count in one["statuses"].items() if status != "200"
        )
    return {**found, "ratio": round(statistics.median(ratios), 3), "ratios": [round(r, 3) for r in ratios]}


def markdown(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model, clients | requests | model alone, µs | req/s on | off | on ÷ off | range of rounds "
        "| CPU ms/request on | off | p50 ms on | off | not 200 on, off |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        on, off, ratios = row["on"], row["off"], row["ratios"]
        cells = [f"{row['model']}, {CLIENTS[row['model']]}", row["form"], f"{row['alone_us']:g}"]
        cells += [f"{on['rate']:.0f}", f"{off['rate']:.0f}", f"{row['ratio']:.2f}"]
        cells += [f"{min(ratios):.2f}-{max(ratios):.2f}", f"{on['cpu_ms']:.3f}", f"{off['cpu_ms']:.3f}"]
        cells += [f"{on['p50_ms']:.2f}", f"{off['p50_ms']:.2f}", f"{on['refused']}, {off['refused']}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def missed(rows: list[dict[str, Any]]) -> list[str]:
    gains = {f"{row['model']} {row['form']}": row["ratio"] for row in rows if row["model"] != NOOP}
    if not gains or max(gains.values()) >= BAR:
        return []
    best = max(gains, key=lambda name: gains[name])
    return [f"{best} gains most, {gains[best]:.2f}; the bar of a real model is {BAR}"]


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=lambda text: text.split(","), default=list(CLIENTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    asked = parser.parse_args()
    if unknown := set(asked.only) - set(CLIENTS):
        parser.error(f"no model named {', '.join(sorted(unknown))}. Known: {', '.join(CLIENTS)}")
    rows = []
    for name in asked.only:
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(name, make(name, folder), asked)
    write_results("serve-fast-path", {"rows": rows}, markdown(rows))
    return exit_code(missed(rows))


if __name__ == "__main__":
    sys.exit(main())
