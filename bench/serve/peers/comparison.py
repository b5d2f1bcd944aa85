"""`infer serve` against LitServe, BentoML and mosec: the same models, the same client, the same machine, in turns.

    python -m bench.serve.peers.comparison [ARTIFACT.infer] [--peers .peers/bin/python] [--rounds 5] [--seconds 2]

Two models: a no-op that gives back a float tensor of 16 values, so that only the server is measured, at saturation;
and MiniLM, sentences of mixed lengths as text in JSON, embeddings out. The rivals serve MiniLM three times: in torch
floats, in int8 by ONNX Runtime's own tools, and as the artifact that infer serves, by `infer.Predictor` inside of them,
so that only the server differs.
Each has one worker and batches up to 64 rows, in the settings that its documentation recommends, and speaks its own
JSON (for mosec and infer also raw tensors). All are up at the same time, and idle when it is another's turn (what that
costs is printed). Answers are checked before anything is timed; the client is `load_generator.cpp`. Figures are medians
over rounds, ratios are taken round by round. Exit code 1 when a bar is missed: on the no-op 3 × LitServe and BentoML
and 1 × mosec in like payloads, on MiniLM 1.2 × the best of them without our code inside. With our Predictor inside a
rival, nine tenths of both are one call, whose CPU time allows 1.06 × mosec at most: there the ratio is shown.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.kernels import whole_models
from bench.kernels.whole_models_sources import MINILM
from bench.serve.load_generator import idle, load
from bench.serve.peers.processes import PACKAGES, peer, versions
from bench.serve.request_forms import EMBED, NOOP_FORMS, Form, answers, largest_error
from bench.serve.server_processes import NOOP, samples, started
from bench.shared.command_line import parser_of
from bench.shared.example_models import artifact
from bench.shared.repository import ROOT
from bench.shared.results import exit_code, progress, write_results

CLIENTS = {"noop": 64, "minilm": 32}
BARS = {"litserve": 3.0, "bentoml": 3.0, "mosec": 1.0}
BAR_EMBED = 1.2
KINDS = {"float": 1e-3, "ort": 1.0, "same": 0.1}  # relative error against the float model that is let through


@dataclass
class Server:
    """One server. `form`: its request format; `error`: the largest relative error of its answers."""

    name: str
    port: int
    pid: int
    form: Form
    requests: list[bytes]
    error: float = 0.0
    idle: float = 0.0


def noop(stack: ExitStack, python: str) -> tuple[list[Server], list[np.ndarray]]:
    rows = [one["x"][0] for one in samples(NOOP, 64)]
    at = {"infer": stack.enter_context(started("infer", NOOP))}
    for name in PACKAGES:
        at[name] = stack.enter_context(peer(python, name, "noop"))
    at["mosec-binary"] = stack.enter_context(peer(python, "mosec", "noop-binary"))
    at["infer-binary"] = at["infer"]
    servers = [
        Server(name, at[name][0], at[name][1].pid, form, [form.request(row) for row in rows])
        for name, form in NOOP_FORMS.items()
    ]
    return servers, rows


def minilm(stack: ExitStack, python: str, path: str, folder: Path) -> tuple[list[Server], list[np.ndarray]]:
    import minilm as model

    texts = model.sentences()[:64]
    at = {"infer": stack.enter_context(started("infer", path))}
    quantized = whole_models.make_rival(MINILM.name, "ORT", folder)
    opened = {"float": path, "ort": str(quantized), "same": path}
    for name in PACKAGES:
        for kind in KINDS:
            at[f"{name}-{kind}"] = stack.enter_context(peer(python, name, kind, opened[kind]))
    servers = [
        Server(name, port, process.pid, form, [form.request(text) for text in texts])
        for name, (port, process) in at.items()
        for form in [EMBED[name.partition("-")[0]]]
    ]
    return servers, list(model.float_embed()(texts))


def check(server: Server, expected: list[np.ndarray], limit: float) -> None:
    """Refuse to time a server whose answers differ from the model's; requests come together, to be batched."""
    server.error = largest_error(answers(server.port, server.requests, server.form.answer), expected)
    if not server.error < limit:
        raise SystemExit(f"{server.name}: its answers are not the model's (error {server.error:.2e})")


def measure(
    name: str, start: Callable[[ExitStack], tuple[list[Server], list[np.ndarray]]], asked: argparse.Namespace
) -> dict[str, Any]:
    """Measure medians of every server, and infer's rate over each rival's, round by round."""
    runs: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        progress(f"{name}: starting")
        servers, expected = start(stack)
        for server in servers:
            kind = server.name.partition("-")[2]
            check(server, expected, 1e-6 if name == "noop" else KINDS.get(kind, KINDS["same"]))
            server.idle = idle(server.pid)
        for number in range(asked.rounds + 1):
            for server in servers if number % 2 else servers[::-1]:
                progress(f"{name}  round {number}  {server.name}")
                found = load(
                    server.port,
                    server.requests,
                    CLIENTS[name],
                    seconds=asked.seconds if number else asked.seconds / 2,
                    pid=server.pid,
                )
                if number:  # the first round warms up, and lets BentoML learn how long batches take
                    runs.setdefault(server.name, []).append(found)
        rows = {
            server.name: {**middle(runs[server.name]), "error": server.error, "idle_cpu": server.idle}
            for server in servers
        }
    ratios = {
        rival: round(
            statistics.median(
                ours["rate"] / max(theirs["rate"], 1 / asked.seconds)  # one that answered nothing in its time
                for ours, theirs in zip(runs[us], runs[rival], strict=True)
            ),
            3,
        )
        for rival in rows
        if not rival.startswith("infer")
        for us in ["infer-binary" if rival.endswith("-binary") else "infer"]
    }
    return {"model": name, "clients": CLIENTS[name], "servers": rows, "ratios": ratios}


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians; `refused`: answers of all rounds with a status other than 200."""
    found = {
        key: round(statistics.median(one[key] for one in runs), 4) for key in runs[0] if key != "statuses"
    }
    refused = sum(number for one in runs for status, number in one["statuses"].items() if status != "200")
    return {**found, "refused": refused}


def missed(tables: list[dict[str, Any]]) -> list[str]:
    said = []
    for table in tables:
        for rival, ratio in table["ratios"].items():
            if rival.endswith("-same"):
                continue
            bar = BARS[rival.partition("-")[0]] if table["model"] == "noop" else BAR_EMBED
            if ratio < bar:
                said.append(f"{table['model']}: {ratio:.2f} × {rival}, the bar is {bar}")
    return said


def markdown(tables: list[dict[str, Any]], made: dict[str, str]) -> str:
    lines = [
        "| model, clients | server | req/s | p50 ms | p99 ms | infer ÷ it "
        "| CPU ms/request | not 200 | error | idle CPU |",
        "|" + "---|" * 10,
    ]
    for table in tables:
        for name, row in table["servers"].items():
            cells = [
                f"{table['model']}, {table['clients']}",
                name,
                f"{row['rate']:.0f}",
                f"{row['p50_ms']:.2f}",
            ]
            ratio = table["ratios"].get(name)
            cells += [f"{row['p99_ms']:.2f}", "" if ratio is None else f"{ratio:.2f}", f"{row['cpu_ms']:.3f}"]
            cells += [str(row["refused"]), f"{row['error']:.1e}", f"{100 * row['idle_cpu']:.1f} %"]
            lines.append(f"| {' | '.join(cells)} |")
    told = ", ".join(f"{name} {version}" for name, version in made.items())
    return "\n".join([*lines, "", f"{told}; JSON in and out, -binary: raw tensors", ""])


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("artifact", nargs="?")
    parser.add_argument("--peers", default=str(ROOT / ".peers" / "bin" / "python"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--only", choices=tuple(CLIENTS))
    asked = parser.parse_args()
    if not os.access(asked.peers, os.X_OK):
        parser.error(f"{asked.peers} is not there: make .peers/.installed")
    tables = []
    if asked.only != "minilm":
        tables.append(measure("noop", lambda stack: noop(stack, asked.peers), asked))
    if asked.only != "noop":
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(asked.artifact or artifact("minilm", folder, quant="int8")).resolve())
            tables.append(
                measure("minilm", lambda stack: minilm(stack, asked.peers, path, Path(folder)), asked)
            )
    made = versions(asked.peers)
    write_results("serve-peers", {"tables": tables, "rivals": made}, markdown(tables, made))
    return exit_code(missed(tables))


if __name__ == "__main__":
    sys.exit(main())
