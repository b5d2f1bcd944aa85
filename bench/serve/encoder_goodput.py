"""Goodput of sentence encoders with mixed lengths, over HTTP: infer, OpenVINO int8, sentence-transformers, infinity.

    python -m bench.serve.encoder_goodput [--models minilm,bert-base] [--systems infer,openvino] [--backend auto]

Open loop: requests of one text each reach `/v1/embeddings` on 127.0.0.1 at the times of a Poisson process, their
lengths drawn log-uniform from LENGTHS. Goodput is the highest rate, found by bisection to within 8 %, at which p99,
from when a request was due, is at most `--slo` ms. Every model has one thread; client and server share the machine,
so that only the ratios mean something. MiniLM has its published weights, BERT-base random ones.

The rivals of int8 run behind the thin server of `encoder_servers.py`, which pads a batch to its longest row, in two
ways: one request at a time, as OpenVINO Model Server runs them, and batches of up to BATCH_TOKENS padded tokens; the
better one counts. infinity serves by itself, where it can be imported. A system whose p99 is above the limit at the
lowest rate has no goodput. Answers are compared with the float model's before anything is timed. What takes minutes
to make is kept in .work/encoder-goodput; `--prepare` makes only that.
"""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from bench.kernels import whole_models_rivals as rivals
from bench.serve import encoder_processes as processes
from bench.serve.open_loop_client import client
from bench.serve.request_forms import answers, post
from bench.serve.serving import NotStartedError
from bench.serve.undisturbed import Driver
from bench.shared.command_line import parser_of
from bench.shared.processor_time import cpu_seconds
from bench.shared.results import exit_code, progress, result_path, write_results

LENGTHS = {"minilm": (8, 128), "bert-base": (8, 64)}
BATCH_TOKENS = 256
WAYS = {
    "infer": ("infer", 0),
    "openvino": ("openvino", 0),
    "openvino-batched": ("openvino", BATCH_TOKENS),
    "sentence-transformers": ("sentence-transformers", BATCH_TOKENS),
    "infinity": ("infinity", 0),
}
BARS = {"openvino": 1.5, "sentence-transformers": 2.0, "infinity": 2.0}
LEAST_COSINE = 0.97  # of our answers with the float model's
TEXTS, CHECKED = 256, 12
LOWEST_RATE, STEP, CLOSE = 2.0, 1.6, 1.08


def missing(system: str) -> str | None:
    """Return why a system cannot be measured here, or None."""
    if system.startswith("openvino"):
        return rivals.missing("OpenVINO")
    module = {"sentence-transformers": "sentence_transformers", "infinity": "infinity_emb"}.get(system)
    absent = module is not None and importlib.util.find_spec(module) is None
    return f"{module} is not installed" if absent else None


def request_of(name: str, text: str) -> bytes:
    """Return the HTTP request for the embedding of a text, as base64."""
    return post("/v1/embeddings", {"model": name, "input": text, "encoding_format": "base64"})


def smallest_cosine(port: int, name: str, texts: list[str], right: np.ndarray) -> float:
    """Return the smallest cosine of an answer with the float model's."""

    def vector(_: Mapping[str, str], body: bytes) -> np.ndarray:
        return np.frombuffer(base64.b64decode(json.loads(body)["data"][0]["embedding"]), "<f4")

    checked = list(zip(texts[:CHECKED], right, strict=False))
    found = answers(port, [request_of(name, text) for text, _ in checked], vector)
    pairs = [(ours, wanted) for ours, (_, wanted) in zip(found, checked, strict=True)]
    return min(float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b))) for a, b in pairs)


class Load:
    """Runs of one system at a rate; `rates`: p99 in ms and processor ms a request of each rate that was run."""

    def __init__(self, sender: Driver, pid: int, seconds: float) -> None:
        self._sender, self._pid, self._seconds = sender, pid, seconds
        self.rates: dict[float, tuple[float, float]] = {}

    def p99(self, rate: float) -> float:
        """Return the 99th percentile in ms; infinite if a request was refused or lost."""
        before = cpu_seconds(self._pid)
        seed = 1000 + len(self.rates)
        rows = self._sender([[self._seconds, rate]], seed=seed, timeout=0.0)
        used = cpu_seconds(self._pid) - before
        kept = rows[rows[:, 0] > 0.1 * self._seconds]
        took = np.where(kept[:, 3] == 200, kept[:, 2] - kept[:, 0], np.inf)
        found = float(np.quantile(took, 0.99, method="higher")) * 1e3
        self.rates[round(rate, 1)] = (round(found, 1), round(used / len(rows) * 1e3, 2))
        return found


def goodput(load: Load, slo: float, first: float) -> float:
    """Return the highest rate, within `CLOSE`, that keeps p99 at or below `slo` ms; 0 if the lowest does not."""
    low, high = 0.0, first
    while load.p99(high) <= slo:
        low, high = high, high * STEP
    while low == 0.0:
        if high <= LOWEST_RATE:
            return 0.0
        high /= STEP
        if load.p99(high) <= slo:
            low, high = high, high * STEP
    while high / low > CLOSE:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if load.p99(middle) <= slo else (low, middle)
    return low


def measure(system: str, model: processes.Prepared, options: argparse.Namespace) -> dict[str, Any]:
    engine, batch_tokens = WAYS[system]
    with processes.started(engine, model, batch_tokens) as (port, running):
        cosine = smallest_cosine(port, model.name, model.texts, model.vectors)
        began = time.perf_counter()
        requests = [request_of(model.name, text) for text in model.texts]
        nothing = np.zeros((len(requests), 1), np.float32)
        with client(port, requests, nothing, np.array(model.lengths, float)) as sender:
            load = Load(sender, running.pid, options.seconds)
            sender([[2.0, 10.0]], seed=1)
            rate = goodput(load, options.slo, options.first)
        seconds = time.perf_counter() - began
    return {"goodput": rate, "cosine": cosine, "seconds": seconds, "rates": load.rates}


def best_rival(found: dict[str, dict[str, Any]], rival: str) -> float | None:
    """Return the goodput of the better way to run a rival; None if it was not measured."""
    rates = [one["goodput"] for name, one in found.items() if name.startswith(rival)]
    return max(rates, default=None)


def judged(model: str, found: dict[str, dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the table lines of one model, and the bars that it misses."""
    lines, missed = [], []
    ours = found.get("infer", {}).get("goodput", 0.0)
    for system, one in found.items():
        ratio = f"{ours / one['goodput']:.2f}" if one["goodput"] else "no rate"
        cpu = min(used for _, used in one["rates"].values())
        rate = f"{one['goodput']:.0f}" if one["goodput"] else f"none from {LOWEST_RATE:g}"
        lines.append(
            f"| {model} | {system} | {rate} | {'' if system == 'infer' else ratio} | {cpu:.2f} | {one['cosine']:.4f} |"
        )
    for rival, bar in BARS.items():
        theirs = best_rival(found, rival)
        if theirs is not None and "infer" in found and ours < bar * theirs:
            missed.append(f"{model}: {ours / theirs:.2f} x {rival}, bar {bar} x")
    if found.get("infer", {"cosine": 1.0})["cosine"] < LEAST_COSINE:
        missed.append(f"{model}: cosine {found['infer']['cosine']:.4f}, bar {LEAST_COSINE}")
    return lines, missed


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(LENGTHS))
    parser.add_argument("--systems", default=",".join(WAYS))
    parser.add_argument("--backend", default="auto", help="backend of our artifact, when it is made")
    parser.add_argument("--slo", type=float, default=50.0, help="p99 in ms")
    parser.add_argument("--seconds", type=float, default=8.0, help="of one run at a rate")
    parser.add_argument("--first", type=float, default=30.0, help="first rate tried")
    parser.add_argument("--add", action="store_true", help="add to the results of today")
    parser.add_argument("--prepare", action="store_true", help="only make what is measured")
    options = parser.parse_args()
    table, missed, results = [], list[str](), dict[str, Any]()
    if options.add and (kept := result_path("serve-encoders")).exists():
        results = json.loads(kept.read_text())["models"]
    for name in options.models.split(","):
        model = processes.prepare(name, LENGTHS[name], TEXTS, options.backend, progress)
        if options.prepare:
            continue
        found = results.setdefault(name, {})
        for system in options.systems.split(","):
            if (reason := missing(system)) is not None:
                progress(f"{name}, {system}: {reason}")
                continue
            try:
                found[system] = measure(system, model, options)
            except NotStartedError as error:
                progress(f"{name}, {system}: {error}")
                continue
            progress(f"{name}, {system}: {found[system]}")
    if options.prepare:
        return 0
    for name, found in results.items():
        lines, below = judged(name, found)
        table, missed = table + lines, missed + below
    head = (
        "| model | system | requests/s at p99 <= "
        + f"{options.slo:g} ms | infer ÷ it | CPU ms/request | cosine |"
    )
    lengths = ", ".join(f"{name} {LENGTHS[name][0]}-{LENGTHS[name][1]}" for name in results)
    note = f"\nTexts of log-uniform length in tokens: {lengths}. One thread for each model.\n"
    write_results(
        "serve-encoders",
        {"models": results},
        "\n".join([head, "|---|---|---|---|---|---|", *table]) + "\n" + note,
    )
    return exit_code(missed)


if __name__ == "__main__":
    sys.exit(main())
