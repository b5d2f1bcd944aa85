"""Compile time of a new JSON schema while another client sends a hundred hostile ones.

    python -m bench.serve.hostile_grammars ARTIFACT.infer [--hostile 100] [--canaries 30] [--same-client]

Starts `infer serve ARTIFACT`, sends the hostile schemas at once from one API key, and a canary a time from another
(from the same one with --same-client), each canary a schema that the server has not seen. Prints p50, p95, p99 and the
largest time of the canaries, the answers that the hostile ones got, and the largest resident memory of the worker and
of all processes.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import psutil

CANARY, HOSTILE = "canary-key", "hostile-key"


def canary(number: int) -> dict[str, Any]:
    fields = {"name": {"type": "string", "maxLength": 8}, f"age{number}": {"type": "integer", "maximum": 99}}
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def hostile(number: int) -> dict[str, Any]:
    """Return hostile schemas of four kinds, each different: long to compile, large, and wide."""
    kind = number % 4
    if kind == 0:
        return {"type": "integer", "multipleOf": 1_000_003 + 2 * number}
    if kind == 1:
        patterns = [f".*{first}.*{second}.*" for first in "abcdef" for second in "ghij"]
        return {"title": str(number), "allOf": [{"type": "string", "pattern": text} for text in patterns]}
    if kind == 2:
        least = 10**14 + number
        fields = {f"k{i}": {"type": "integer", "minimum": i, "maximum": least + i} for i in range(600)}
        return {"type": "object", "properties": fields, "required": list(fields)}
    return {"title": str(number), "type": "string", "pattern": "a{1000000}"}


@contextmanager
def served(command: list[str]) -> Iterator[tuple[str, int]]:
    """Start a server by the arguments of Python; yield its address and process id."""
    with subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, text=True) as process:
        try:
            for line in process.stdout or ():
                if found := re.search(r"http://[\d.]+:\d+", line):
                    yield found[0], process.pid
                    break
        finally:
            process.terminate()


def ask(client: httpx.Client, key: str, model: str, schema: dict[str, Any]) -> tuple[int, float]:
    """Return the status and seconds of one request of eight tokens.

    One `client` for all: to make one takes 30 ms of this process, for which the canary would wait.
    """
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    body = {"model": model, "prompt": "x", "max_tokens": 8, "response_format": form}
    began = time.monotonic()
    headers = {"Authorization": f"Bearer {key}"}
    answer = client.post("/v1/completions", json=body, headers=headers)
    return answer.status_code, time.monotonic() - began


def made_client(url: str, connections: int) -> httpx.Client:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.Client(base_url=url, timeout=120, limits=limits)


def watch(pid: int, over: threading.Event, largest: dict[str, int]) -> None:
    """Track the largest resident memory, in MiB, of the worker and of all processes together."""
    while not over.wait(0.1):
        sizes: dict[int, int] = {}
        workers = 0
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                sizes[process.pid] = process.memory_info().rss >> 20
                if "infer.serve.workers" in process.cmdline():
                    workers = max(workers, sizes[process.pid])
            except psutil.Error:
                continue
        largest["worker"] = max(largest.get("worker", 0), workers)
        largest["all"] = max(largest.get("all", 0), sum(sizes.values()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("artifact")
    parser.add_argument("--hostile", type=int, default=100)
    parser.add_argument("--canaries", type=int, default=30)
    parser.add_argument("--same-client", action="store_true")
    given = parser.parse_args()
    keys = ["--api-key", CANARY, "--api-key", HOSTILE]
    command = ["-m", "infer", "serve", given.artifact, "--port", "0", *keys]
    with served(command) as (url, pid), made_client(url, given.hostile + 1) as client:
        mine = HOSTILE if given.same_client else CANARY
        listed = client.get("/v1/models", headers={"Authorization": f"Bearer {mine}"}).json()
        model = listed["data"][0]["id"]
        over, largest, results = threading.Event(), dict[str, int](), list[tuple[int, float]]()
        threading.Thread(target=watch, args=(pid, over, largest), daemon=True).start()
        before = [ask(client, mine, model, canary(-i - 1)) for i in range(5)]

        def attack(number: int) -> None:
            results.append(ask(client, HOSTILE, model, hostile(number)))

        threads = [threading.Thread(target=attack, args=(i,)) for i in range(given.hostile)]
        for thread in threads:
            thread.start()
        during = []
        for number in range(given.canaries):
            during.append(ask(client, mine, model, canary(number)))
            time.sleep(0.1)
        for thread in threads:
            thread.join()
        over.set()
        print(json.dumps(report(before, during, results, largest), indent=1))
    return 0


def report(
    before: list[tuple[int, float]],
    during: list[tuple[int, float]],
    results: list[tuple[int, float]],
    largest: dict[str, int],
) -> dict[str, Any]:
    times = sorted(seconds for _, seconds in during)
    return {
        "canary_before_ms": round(1000 * sorted(seconds for _, seconds in before)[len(before) // 2]),
        "canary_p50_ms": round(1000 * times[len(times) // 2]),
        "canary_p95_ms": round(1000 * times[int(0.95 * len(times))]),
        "canary_p99_ms": round(1000 * times[int(0.99 * len(times))]),
        "canary_max_ms": round(1000 * times[-1]),
        "canary_answers": dict(Counter(status for status, _ in during)),
        "hostile_answers": dict(Counter(status for status, _ in results)),
        "hostile_max_s": round(max(seconds for _, seconds in results), 1),
        "worker_mib": largest.get("worker", 0),
        "all_processes_mib": largest.get("all", 0),
    }


if __name__ == "__main__":
    sys.exit(main())
