"""`infer serve --ray`: start or join a Ray cluster, deploy the service, and take it down again at SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from ..errors import InferError, NotUsableError, UsageError
from .limits import LOOPBACK
from .ray_app import NAME, Asked, application

IMPORT = "infer.serve.ray_app:application"
LOOK_SECONDS = 1.0


class Cluster(msgspec.Struct, frozen=True, kw_only=True):
    """`address`: of a cluster that runs, as Ray writes it ("auto", "HOST:6379", "ray://…"); None starts one here.
    `host` and `port`: where the proxies answer, one on every node or, with `head_only`, on the first alone."""

    address: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    head_only: bool = False

    @property
    def proxies(self) -> str:
        """As Ray calls it."""
        return "HeadOnly" if self.head_only else "EveryNode"


def check(asked: Asked, cluster: Cluster, *, anonymous: bool = False) -> None:
    """Raises `UsageError` and, where Ray is not installed, `NotUsableError`."""
    asked.check()
    if cluster.host not in LOOPBACK and not asked.api_key and not anonymous:
        raise UsageError(
            f"{cluster.host} can be reached from other machines, and no API key is set",
            hint="Set --api-key (or INFER_API_KEY), or say --anonymous",
        )
    if missing := [path for path in asked.artifacts if not Path(path).is_dir()]:
        raise UsageError(f"no artifact at {missing[0]}", hint="Every node must find it at this path")
    if find_spec("ray") is None:
        raise NotUsableError("serving on a cluster needs ray", hint="pip install 'infer[ray]'")


def config(asked: Asked, cluster: Cluster) -> dict[str, Any]:
    """Ray's own config file, for `serve deploy FILE`; JSON is YAML. Without the API key, which no file should hold."""
    args = msgspec.to_builtins(asked)
    del args["api_key"]
    return {
        "proxy_location": cluster.proxies,
        "http_options": {"host": cluster.host, "port": cluster.port},
        "applications": [{"name": NAME, "route_prefix": "/", "import_path": IMPORT, "args": args}],
    }


def write_config(path: Path, asked: Asked, cluster: Cluster) -> None:
    asked.check()
    path.write_text(json.dumps(config(asked, cluster), indent=2) + "\n")


def run(
    asked: Asked,
    cluster: Cluster,
    *,
    anonymous: bool = False,
    say: Callable[[str], None] = print,
) -> int:
    """Serve until SIGTERM or SIGINT; the exit code: 0, or 1 when Ray gave the application up.

    Raises as `check` does, and `InferError` with Ray's reason when no replica came up.
    """
    check(asked, cluster, anonymous=anonymous)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is told to anybody
    import ray
    from ray import serve

    over = threading.Event()
    ray.init(
        address=cluster.address, include_dashboard=None if cluster.address else False, log_to_driver=False
    )
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has handlers of its own, which end the process
        signal.signal(number, lambda *_: over.set())
    try:
        serve.start(proxy_location=cluster.proxies, http_options={"host": cluster.host, "port": cluster.port})
        try:
            serve.run(application(msgspec.to_builtins(asked)), name=NAME, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise InferError(f"Ray could not start the service: {error}") from error
        names = ", ".join(Path(path).stem for path in asked.artifacts)
        say(
            f"serving {names} on {len(ray.nodes())} nodes at http://{cluster.host}:{cluster.port} - docs at /docs"
        )
        failed = False
        while not over.wait(LOOK_SECONDS) and not failed:
            state = serve.status().applications.get(NAME)
            failed = state is None or state.status == "DEPLOY_FAILED"
        serve.delete(NAME)
        if not cluster.address:
            serve.shutdown()
        return int(failed)
    finally:
        ray.shutdown()
