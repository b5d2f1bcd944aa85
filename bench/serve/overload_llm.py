"""Goodput of a language model at 0.5 to 10 times its capacity, by time to the first token.

    python -m bench.serve.overload_llm [ARTIFACT.infer] [--seconds 2.5] [--rounds 9] [--rungs 0.5,1,2,5,10]

As bench/serve/overload.py, always `--steady`. Requests are streams of 16 tokens after prompts of 20 to 300 words, of
32,768 no two alike; each counts as much as it has words and tokens. C, the SLO and goodput are about the time to the
first token; an answer is right when its end came too. The server is started twice: to find C and the SLO, and then with
`--limit max_start_seconds=` 0.9 SLO, for clients can't say how long they wait for a first token. Without an artifact,
models/pydoc_lm is made int8 first.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np

from bench.serve.open_loop_client import client
from bench.serve.overload import CAUTION, capacity, guess, ladder, parsed
from bench.serve.overload_figures import markdown, missed
from bench.serve.request_forms import post
from bench.serve.serving import Server, serving
from bench.serve.undisturbed import UndisturbedRuns
from bench.shared.example_models import artifact
from bench.shared.results import write_results

PROMPTS, TOKENS = 32768, 16
FLOOD = 1.0, 400.0  # seconds, requests a second


def prompts(name: str) -> tuple[list[bytes], np.ndarray]:
    """Return requests, each with random words, and their costs."""
    random = np.random.default_rng(7)
    words = np.array(["the", "a", "of", "return", "value", "list", "object", "string", "number", "None"])
    requests, counts = [], random.integers(20, 300, PROMPTS)
    for size in counts:
        body = {"model": name, "prompt": " ".join(random.choice(words, size)), "max_tokens": TOKENS}
        body |= {"stream": True, "ignore_eos": True, "temperature": 0.0}
        requests.append(post("/v1/completions", body))
    return requests, counts.astype(float) + TOKENS


def limited(artifact: str, folder: Path, *limits: str) -> AbstractContextManager[Server]:
    """Start a server with its own limits."""
    words = [word for limit in limits for word in ("--limit", limit)]
    return serving([sys.executable, "serve.py", artifact, "--port", "0", *words], log=folder / "server.log")


def measure(
    artifact: str, arguments: argparse.Namespace, work: Path
) -> tuple[float, float, dict[str, Any], str]:
    requests, costs = prompts(json.loads((Path(artifact) / "manifest.json").read_text())["name"])
    with limited(artifact, work) as (port, _), client(port, requests, None, costs) as fire:
        alone = UndisturbedRuns(fire)
        about = guess(alone, *FLOOD)
        c, slo = capacity(alone, 0.6 * about, 1.1 * about, arguments.seconds)
    limit = f"max_start_seconds={CAUTION * slo:.4f}"
    with limited(artifact, work, limit) as (port, _), client(port, requests, None, costs) as fire:
        alone = UndisturbedRuns(fire)
        found = ladder(alone, c, slo, arguments, {})
    return c, slo, found, alone.note


def main() -> int:
    arguments = parsed(__doc__, [0.5, 1.0, 2.0, 5.0, 10.0], [])
    arguments.steady = True
    os.environ |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.artifact or artifact("pydoc_lm", folder, quant="int8")
        c, slo, found, note = measure(path, arguments, Path(folder))
    words = missed(found, slo)
    what = f"pydoc_lm, streams of {TOKENS} tokens after 20 to 300, times are those of the first token; "
    what = f"{what}max_start_seconds is {CAUTION:g} SLO; {arguments.rounds} rounds, {note}"
    text = markdown(what, c, slo, found, words)
    table = {"capacity": round(c, 2), "slo_ms": round(1e3 * slo, 1), "seconds": arguments.seconds}
    table |= {"rounds": arguments.rounds}
    write_results("serve-overload-lm", {**table, "rows": found, "missed": words}, text)
    return 1 if words else 0


if __name__ == "__main__":
    sys.exit(main())
