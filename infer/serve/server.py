"""Start of a server from artifact paths, and its shutdown on SIGTERM."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import gc
import logging
import os
import socket
import ssl
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import uvicorn

from ..artifact.artifact_of_source import artifact_of
from ..options import from_values
from ..process.child import process_age
from .api.kserve.kserve_repository import Repository
from .fast_path.coalescer import Coalescer
from .grpc import RpcListener, rpc_listener
from .http import http_protocol
from .http.access_control import AllowedHosts, allowed_hosts
from .http.app import build
from .http.listener import listen, port_errors
from .http.request_life import RequestLife
from .limits import LOOPBACK
from .model_admin import ModelAdmin
from .model_repository import ModelRepository
from .open_service import api_keys, open_service, tls_of
from .options import ServeOptions
from .service import Service
from .signals import Signals, StoppedError, stoppable
from .startup import print_line, slow_start_reports, startup_line
from .workers import model_loading

log = logging.getLogger("infer.serve")
Printer = Callable[[str], None]
LINGER = 0.3  # seconds a stopping server still answers 503, so that load balancers notice
PROOF = 10.0  # seconds that the startup line waits for the test of tokenizers and chat templates
SWITCH_INTERVAL = 0.0005  # default 5 ms: so long a busy event loop would delay executor threads


def run(artifacts: Sequence[str | os.PathLike[str]], *, say: Printer | None = None, **options: Any) -> int:
    """Serve these artifacts until SIGTERM or SIGINT; return the exit code.

    `options` are the fields of `ServeOptions` by name (`port=9000, replicas=2, kv_memory="2GiB"`), checked like those
    of `infer serve`. `say`: called with the startup line instead of printing it. Raises as `start` does, and
    `UsageError` for an unknown option or a wrong value.
    """
    return start(from_values(ServeOptions, {"artifacts": artifacts, **options}), say=say)


def start(options: ServeOptions, *, say: Printer | None = None) -> int:
    """Serve until SIGTERM or SIGINT; return the exit code.

    Raises `BusyError` when the port is in use (before anything is loaded), `UsageError` for an address that other
    machines reach with neither a key nor `anonymous`, `ResourceError` for models that do not fit into memory, and the
    errors of `Predictor.load`.
    """
    began = process_age()
    keys = api_keys(options)
    tls = tls_of(options)
    with stoppable(), contextlib.suppress(StoppedError), contextlib.ExitStack() as stack:
        host, started = options.host, stack.enter_context(slow_start_reports())
        listener = stack.enter_context(listen(host, options.port, api_key=keys, anonymous=options.anonymous))
        rpc = stack.enter_context(rpc_listener(options, keys))
        repository = ModelRepository(
            artifact_of(options.plan(text), shown=True) for text in options.artifacts
        )
        service, admin = open_service(options, repository, keys, stack)
        models = [engine.model for engine in service.models.values()]
        for model in models:
            for phase, seconds in model.phases.items():
                service.metrics.record_load_seconds(model.info.name, model.info.version, phase, seconds)
        timings = model_loading.startup_summary(models, server=began, opening=process_age() - began)
        hosts = allowed_hosts(options.allow_hosts, loopback=host in LOOPBACK, keys=bool(keys), bound=host)
        notes = [timings] if options.timings else []

        def announce(line: str) -> None:
            started()
            (say or print_line)(line)

        return serve(service, listener, tls=tls, hosts=hosts, say=announce, notes=notes, rpc=rpc, admin=admin)
    return 0


def serve(
    service: Service,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    hosts: AllowedHosts | None = None,
    say: Printer | None = None,
    notes: Sequence[str] = (),
    rpc: RpcListener | None = None,
    admin: ModelAdmin | None = None,
) -> int:
    """Warm up, serve and drain; return the exit code: 0, or 1 when an engine died.

    `listener`: socket of `listener.listen`; `hosts`: accepted Host headers, None for any; `notes`: lines printed after
    the startup line; `rpc`: where gRPC is served; `admin`: loads and unloads models for clients, None if they may not.
    """
    for engine in service.models.values():
        began = time.perf_counter()
        engine.warmup()
        if not engine.model.in_workers:
            info, seconds = engine.info, time.perf_counter() - began
            service.metrics.record_load_seconds(info.name, info.version, "warmup", seconds)
    gc.collect()
    gc.freeze()
    atexit.register(
        gc.unfreeze
    )  # else frozen objects are not destroyed at exit, and torch's libraries complain
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL)
    np.seterr(over="ignore", invalid="ignore")  # outputs are squared to see whether all are finite
    changes = None if admin is None else Repository(admin)
    app = build(service, [] if changes is None else changes.routes())
    config = uvicorn.Config(
        app,
        timeout_graceful_shutdown=2,
        **http_protocol.uvicorn_options(service.limits, service.refused, tls, hosts, Coalescer(app)),
    )
    host, port = listener.getsockname()[:2]
    with port_errors(host, port):
        listener.listen(service.limits.max_connections)
    loop = "asyncio" if sys.platform == "win32" else "uvloop"
    config.loop = loop
    server = Server(config)
    server.secure = tls is not None
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(
            _run_until_drained(app.life, server, listener, say or print_line, notes, rpc, changes)
        )


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, which would stop listening at once and re-raise the signal."""

    secure = False  # TLS

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run_until_drained(
    life: RequestLife,
    server: Server,
    listener: socket.socket,
    say: Printer,
    notes: Sequence[str],
    rpc: RpcListener | None,
    changes: Repository | None,
) -> int:
    signals, service = Signals(asyncio.get_running_loop()), life.service
    service.start()
    rpc_server = None if rpc is None else rpc.server(life, changes)
    if rpc_server is not None:
        await rpc_server.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    if proofs := [model.self_test_task for model in service.generators.values()]:
        await asyncio.wait(proofs, timeout=PROOF)
    for line in (startup_line(service, listener, rpc, secure=server.secure), *notes):
        say(line)
    try:
        while not signals.first.is_set() and not service.died and not serving.done():
            await _wait(signals.first, 0.25)
        await _drain(service, signals)
    finally:
        died = service.died
        service.stop()
        server.should_exit = True
        if rpc_server is not None:
            await rpc_server.stop()
        await serving
        signals.remove()
    return 1 if died else 0


async def _drain(service: Service, signals: Signals) -> None:
    """Report not ready, then finish admitted requests, until a second signal or the drain limit."""
    service.drain()
    began = time.monotonic()
    while (spent := time.monotonic() - began) < service.limits.drain_seconds and not service.died:
        if signals.second.is_set() or (service.idle and spent > LINGER):
            return
        await _wait(signals.second, 0.01)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
