"""The rivals of `bench/serve/peers/comparison.py` in their own environment."""

from __future__ import annotations

import json
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

from bench.serve.serving import Server, free_port, serving

HERE = Path(__file__).resolve().parent
PACKAGES = ("litserve", "bentoml", "mosec")


def peer(python: str, name: str, kind: str, artifact: str = "") -> AbstractContextManager[Server]:
    """Start a rival; its port and process."""
    port = free_port()
    where = ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning", "--timeout", "120000"]
    service = f"bentoml_service:{'Echo' if kind == 'noop' else 'Embed'}"
    command = {
        "litserve": [str(HERE / "litserve_server.py"), str(port)],
        "bentoml": ["-m", "bentoml", "serve", service, "--host", "127.0.0.1", "--port", str(port)],
        "mosec": [str(HERE / "mosec_server.py"), *where],
    }[name]
    environment = {"BENTOML_DO_NOT_TRACK": "True", "LIT_NO_ANALYTICS": "1", "HF_HUB_OFFLINE": "1"}
    environment["BENTOML_CONFIG_OPTIONS"] = (
        "services.logging.access.enabled=false"  # as in infer and the others
    )
    environment |= {"PEERS_ARTIFACT": artifact, "PEERS_KIND": kind}
    return serving([python, *command], port=port, cwd=HERE, **environment)


def versions(python: str) -> dict[str, str]:
    asked = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    told = subprocess.run([python, "-c", asked, *PACKAGES], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, str] = json.loads(told.stdout)
    return found
