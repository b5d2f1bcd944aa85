"""Python side of `load_generator.cpp`: compiled once per version of its text, then run for one measurement."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.shared.processor_time import cpu_seconds

SOURCE = Path(__file__).with_suffix(".cpp")


def program() -> str:
    """Return the compiled client; raises `SystemExit` where there is no compiler."""
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise SystemExit("the load client needs a C++ compiler (c++ or g++, or $CXX)")
    name = f"infer-serve-load-{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:12]}"
    built = Path(tempfile.gettempdir()) / f"{name}-{os.getuid()}"
    if not built.exists():
        fresh = f"{built}.{os.getpid()}"
        subprocess.run([compiler, "-O2", "-std=c++17", str(SOURCE), "-o", fresh], check=True)
        os.replace(fresh, built)
    return str(built)


def load(
    port: int, requests: list[bytes], clients: int, *, seconds: float, warm: float = 0.5, pid: int = 0
) -> dict[str, Any]:
    """Run a closed loop of requests.

    Returns `rate` of 200s per second, `p50_ms`, `p99_ms`, `statuses`; with `pid`, `cpu_ms` per request of that
    process and its children, warming included.
    """
    with tempfile.NamedTemporaryFile(suffix=".requests") as file:
        for request in requests:
            file.write(len(request).to_bytes(4, "little") + request)
        file.flush()
        before = cpu_seconds(pid)
        command = [program(), str(port), file.name, str(clients), str(warm), str(seconds)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if ran.returncode:
            raise SystemExit(f"the load client ended with {ran.returncode}")
    found: dict[str, Any] = json.loads(ran.stdout)
    answered = sum(found["statuses"].values()) * (warm + seconds) / seconds
    found["cpu_ms"] = 1e3 * (cpu_seconds(pid) - before) / max(answered, 1)
    return found


def idle(pid: int, seconds: float = 1.0) -> float:
    """Return the share of a core that the process and its children take without requests."""
    before = cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / seconds
