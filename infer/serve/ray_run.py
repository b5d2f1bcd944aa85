"""`infer serve --ray`: start or join a Ray cluster, deploy the service, and remove it at SIGTERM."""

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

from ..distribution import install
from ..errors import InferError, NotUsableError, UsageError
from . import ray_app
from .http.listener import require_key
from .open_service import api_keys
from .options import ServeOptions
from .ray_app import NAME, application, replica_args

IMPORT = "infer.serve.ray_app:application"
LOOK_SECONDS = 1.0


def check(options: ServeOptions) -> None:
    """Raise `UsageError` for what can't be deployed and, where Ray is not installed, `NotUsableError`."""
    ray_app.check(options)
    require_key(options.host, options.api_key, anonymous=options.anonymous)
    if missing := [path for path in options.artifacts if not Path(path).is_dir()]:
        raise UsageError(f"no artifact at {missing[0]}", hint="Every node must find it at this path")
    if find_spec("ray") is None:
        raise NotUsableError("serving on a cluster needs ray", hint=install("ray"))


def on_every_node(options: ServeOptions) -> ServeOptions:
    """Return the options as valid on every node: absolute paths, API keys read from their file."""
    paths = tuple(os.path.abspath(path) for path in options.artifacts)
    own = {"artifacts": paths, "api_key": tuple(api_keys(options) or ()), "api_key_file": None}
    return msgspec.structs.replace(options, **own)


def config(options: ServeOptions, *, head_only: bool = False) -> dict[str, Any]:
    """Return Ray's config file for `serve deploy FILE` (JSON is YAML), without the API keys."""
    args = replica_args(options)
    args.pop("api_key", None)
    return {
        "proxy_location": _proxies(head_only),
        "http_options": {"host": options.host, "port": options.port},
        "applications": [{"name": NAME, "route_prefix": "/", "import_path": IMPORT, "args": args}],
    }


def _proxies(head_only: bool) -> str:
    """Return Ray's name for the location of its proxies."""
    return "HeadOnly" if head_only else "EveryNode"


def write_config(path: Path, options: ServeOptions) -> None:
    """Write `config`; raises `UsageError` for what can't be deployed."""
    ray_app.check(options)
    path.write_text(json.dumps(config(options), indent=2) + "\n")


def start(options: ServeOptions) -> int:
    """Deploy and stay until SIGTERM, or write Ray's config file; returns the exit code."""
    options = on_every_node(options)
    if options.ray_config is not None:
        write_config(Path(options.ray_config), options)
        return 0
    return run(options)


def run(options: ServeOptions, *, head_only: bool = False, say: Callable[[str], None] = print) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code: 0, or 1 when Ray gave the application up.

    `head_only`: a proxy on the first node alone, not one on each. Raises as `check` does, and `InferError`
    with Ray's reason when no replica came up.
    """
    check(options)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage data is sent
    import ray
    from ray import serve

    over = threading.Event()
    address, host, port = options.ray_address, options.host, options.port
    ray.init(address=address, include_dashboard=None if address else False, log_to_driver=False)
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray has handlers of its own, which end the process
        signal.signal(number, lambda *_: over.set())
    try:
        serve.start(proxy_location=_proxies(head_only), http_options={"host": host, "port": port})
        try:
            serve.run(application(replica_args(options)), name=NAME, route_prefix="/", blocking=False)
        except RuntimeError as error:
            raise InferError(f"Ray could not start the service: {error}") from error
        names = ", ".join(Path(path).stem for path in options.artifacts)
        say(f"serving {names} on {len(ray.nodes())} nodes at http://{host}:{port} - docs at /docs")
        failed = False
        while not over.wait(LOOK_SECONDS) and not failed:
            state = serve.status().applications.get(NAME)
            failed = state is None or state.status == "DEPLOY_FAILED"
        serve.delete(NAME)
        if not address:
            serve.shutdown()
        return int(failed)
    finally:
        ray.shutdown()
