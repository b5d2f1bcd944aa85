"""Start and stop of the rivals of `bench/serve/peers/comparison.py` in their own environment."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from bench.shared.repository import child_environment

HERE = Path(__file__).resolve().parent
START_SECONDS = 120.0
PACKAGES = ("litserve", "bentoml", "mosec")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def peer(python: str, name: str, kind: str, artifact: str = "") -> Iterator[tuple[int, int]]:
    """Yield port and process id of a rival that takes connections; it and its children end with the block."""
    port = _free_port()
    where = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout", "120000"]
    command = {
        "litserve": [str(HERE / "litserve_server.py"), str(port)],
        "bentoml": ["-m", "bentoml", "serve", f"bentoml_service:{'Echo' if kind == 'noop' else 'Embed'}"],
        "mosec": [str(HERE / "mosec_server.py"), *where],
    }[name]
    if name == "bentoml":
        command += ["--host", "127.0.0.1", "--port", str(port)]
    # As for infer: threads that spin at OpenMP's barriers would starve the servers whose turn it is.
    env = child_environment(OMP_WAIT_POLICY="passive", PEERS_ARTIFACT=artifact, PEERS_KIND=kind)
    env |= {"BENTOML_DO_NOT_TRACK": "True", "LIT_NO_ANALYTICS": "1", "HF_HUB_OFFLINE": "1"}
    env["BENTOML_CONFIG_OPTIONS"] = "services.logging.access.enabled=false"  # as in infer and the others
    running = subprocess.Popen(
        [python, *command],
        cwd=HERE,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _wait(name, port, running)
        yield port, running.pid
    finally:
        _end(running)


def _wait(name: str, port: int, running: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and running.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.1)
    raise SystemExit(f"{name} did not start")


def _end(running: subprocess.Popen[bytes]) -> None:
    """Stop the process group of a rival, which leads a session of its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        running.wait(5)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    running.wait()


def versions(python: str) -> dict[str, str]:
    asked = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    told = subprocess.run([python, "-c", asked, *PACKAGES], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found
