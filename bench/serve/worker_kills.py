"""Outcome of every tensor and text request while workers are killed (kill -9) under load.

    python -m bench.serve.worker_kills [--seconds 40] [--every 4] [--clients 8]

Models of a few lines, so that the load falls on the serving machinery. Requests that had sent nothing are to be
answered by the next worker; only one that was being read at two deaths may get a 500, and says so.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from tests.support.worker_models import body_of, children, serving

KINDS: dict[str, dict[str, Any]] = {
    "tensors": {"options": {"seconds": 0.002, "opening": 0.3}},
    "text": {"opener": "fake_llm", "text": True, "options": {"seconds": 0.001}},
}


def client(kind: str, url: str, number: int, until: float, found: Counter[str]) -> None:
    with httpx.Client(base_url=url, timeout=60) as session:
        count = 0
        while time.monotonic() < until:
            count += 1
            if kind == "tensors":
                answer = session.post("/v2/models/faulty/infer", json=body_of(number + count % 500))
            else:
                prompt = f"{'ab'[count % 2]}{number}{count}"
                body = {"model": "fake_llm", "prompt": prompt, "max_tokens": 8}
                answer = session.post("/v1/completions", json=body)
            code = str(answer.status_code)
            found[code if code == "200" else f"{code} {answer.text[:160]}"] += 1


def run(kind: str, seconds: float, every: float, clients: int) -> bool:
    with tempfile.TemporaryDirectory() as home:
        folder = Path(home) / ("fake_llm" if kind == "text" else "faulty")
        folder.mkdir()
        return load(kind, str(folder), seconds, every, clients)


def load(kind: str, folder: str, seconds: float, every: float, clients: int) -> bool:
    found: Counter[str] = Counter()
    with serving(path=folder, **KINDS[kind]) as (server, url):
        until = time.monotonic() + seconds
        threads = [
            threading.Thread(target=client, args=(kind, url, number, until, found))
            for number in range(clients)
        ]
        for thread in threads:
            thread.start()
        kills = 0
        while time.monotonic() < until - 2:
            time.sleep(every)
            for worker in children(server.pid):
                os.kill(worker, signal.SIGKILL)
                kills += 1
        for thread in threads:
            thread.join()
    print(f"{kind}: {sum(found.values())} requests, {kills} kills: {dict(found)}", flush=True)
    return not any(code.startswith("500") and "twice" not in code for code in found)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--every", type=float, default=4)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    asked = parser.parse_args()
    good = [run(kind, asked.seconds, asked.every, asked.clients) for kind in asked.kinds]
    return int(not all(good))


if __name__ == "__main__":
    sys.exit(main())
