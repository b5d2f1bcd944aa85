"""From artifact paths to a running server, and from SIGTERM to a clean end."""

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import uvicorn

from ..errors import UsageError
from ..spec import parse_size
from . import descriptors, opening, wire
from .admin import Admin, check_all
from .app import build
from .hosts import Hosts, guard
from .limits import LOOPBACK, ServeLimits
from .observing import Observing, attach
from .port import greeting, listen, port_errors
from .repository import Repository
from .service import Service
from .signals import Signals, StoppedError, stoppable
from .worker.process import age

log = logging.getLogger("infer.serve")
LINGER = 0.3  # seconds a stopping server still answers 503, so that balancers see it go
PROOF = 10.0  # seconds that the first line waits for tokenizers and chat templates to be tried
SWITCH_INTERVAL = 0.0005  # the engine's thread would wait 5 ms for a busy event loop otherwise


def run(
    paths: Sequence[str | os.PathLike[str]],
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    device: str = "auto",
    threads: int | None = None,
    trust_code: bool = False,
    api_key: str | Sequence[str] | None = None,
    tls: ssl.SSLContext | None = None,
    anonymous: bool = False,
    allow_hosts: Sequence[str] = (),
    max_delay_us: int | None = None,
    drain: float | None = None,
    kv_memory: str | int | None = None,
    max_tokens_per_step: int | None = None,
    batch_invariant: bool = False,
    share_prefix_cache: bool = False,
    lora: Mapping[str, str | os.PathLike[str]] | None = None,
    in_process: bool = False,
    replicas: int = 1,
    timings: bool = False,
    allow_reload: bool = False,
    memory: str | int | None = None,
    limits: ServeLimits | None = None,
    observing: Observing | None = None,
    say: Callable[[str], None] | None = None,
) -> int:
    """Serve these artifacts until SIGTERM or SIGINT; the exit code. `port` 0 takes a free one.

    Raises `BusyError` when the port is taken (before anything is loaded), `UsageError` for an address beyond
    this machine with neither `api_key` nor `anonymous`, and whatever `Predictor.load` raises. `say` gets the
    one line that is printed when requests are answered. Each model runs in `replicas` processes of its own, or,
    `in_process`, in this one. `api_key` may be several; with `tls` (see `tls.context`) the port speaks HTTPS.
    `max_delay_us` and `drain` outrank `limits`; `kv_memory`, `max_tokens_per_step` and `batch_invariant`
    are for each language model (see `Predictor.load`), `lora` names adapters of the only one, folders by name. With
    `timings` a second line says what the start took. `observing`: nothing by default. A path may also be a folder
    of models or of versions (see `repository`); `allow_reload` lets clients load and unload what is in these
    folders. What does not fit into `memory` ("8GiB" or bytes), or into what is free, is refused with
    `ResourceError`. `allow_hosts`: see `hosts.guard`. `share_prefix_cache`: among clients of different keys.
    """
    began = age()
    if not paths:
        raise UsageError("nothing to serve", hint="Name at least one artifact: infer serve model.infer")
    options: dict[str, Any] = {
        "device": device,
        "threads": threads,
        "trust_code": trust_code,
        "kv_memory": kv_memory,
        "max_tokens_per_step": max_tokens_per_step,
        "batch_invariant": batch_invariant,
    }
    own = {"max_delay_us": max_delay_us, "drain_seconds": drain}
    given = {name: value for name, value in own.items() if value is not None}
    bounds = msgspec.structs.replace(limits or ServeLimits(), **given)
    with stoppable(), contextlib.suppress(StoppedError), contextlib.ExitStack() as stack:
        listener = stack.enter_context(listen(host, port, api_key=api_key, anonymous=anonymous))
        repository, budget = Repository(paths), parse_size(memory, "--memory")
        chosen = repository.latest()
        if lora:
            options["adapters"] = _adapters(lora, len(chosen))
        bounds, said = descriptors.fit(bounds, len(chosen) * replicas * (2 if allow_reload else 1))
        if said is not None:
            log.warning("%s", said)
        cache = parse_size(kv_memory, "--kv-memory")
        caches = check_all(chosen, replicas, budget, cache)
        opener = opening.Opener(options, replicas, in_process, bounds.watchdog_seconds, caches)
        opened = opener.open(chosen, stack)
        service = Service(
            [predictor for predictor, _ in opened],
            bounds,
            api_key=api_key,
            share_prefix_cache=share_prefix_cache,
        )
        attach(service, observing or Observing())
        if allow_reload:
            service.admin = Admin(
                service,
                repository,
                opener.begin,
                replicas=replicas,
                memory=budget,
                kv_memory=cache,
                caches=caches,
            )
            stack.callback(service.admin.close)
        for predictor, phases in opened:
            for phase, seconds in phases.items():
                service.metrics.loaded(predictor.name, predictor.version, phase, seconds)
        notes = [opening.times(opened, server=began, opening=age() - began)] if timings else []
        hosts = guard(allow_hosts, loopback=host in LOOPBACK, keys=bool(api_key), bound=host)
        return serve(service, listener, tls=tls, hosts=hosts, say=say, notes=notes)
    return 0


def _adapters(lora: Mapping[str, str | os.PathLike[str]], models: int) -> dict[str, str]:
    if models != 1:
        raise UsageError(f"adapters belong to one model, and {models} are served", where="--lora")
    return {name: os.fspath(folder) for name, folder in lora.items()}


def serve(
    service: Service,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    hosts: Hosts | None = None,
    say: Callable[[str], None] | None = None,
    notes: Sequence[str] = (),
) -> int:
    """Warm up, answer, drain; the exit code: 0, or 1 when an engine died. `listener` as `port.listen` gives it;
    `hosts`: what requests may call the server, None: anything.

    `notes` are said after the line that says that requests are answered.
    """
    for model in service.models.values():
        began = time.perf_counter()
        model.warmup()
        name, version = model.predictor.name, model.predictor.version
        if not hasattr(model.predictor, "executors"):
            service.metrics.loaded(name, version, "warmup", time.perf_counter() - began)
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)  # else it is not destroyed at the end, of which torch's libraries complain
    gc.set_threshold(50_000, 20, 50)
    sys.setswitchinterval(SWITCH_INTERVAL)
    config = uvicorn.Config(
        build(service),
        timeout_graceful_shutdown=2,
        **wire.options(service.limits, service.refused, tls, hosts),
    )
    host, port = listener.getsockname()[:2]
    with port_errors(host, port):
        listener.listen(service.limits.max_connections)
    loop = "asyncio" if sys.platform == "win32" else "uvloop"
    config.loop = loop
    server = Server(config)
    server.secure = tls is not None
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        return runner.run(_live(service, server, listener, say or _print, notes))


class Server(uvicorn.Server):
    """uvicorn without its signal handlers: it would stop listening at once and die of the signal at last."""

    secure = False  # whether its port speaks TLS

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _live(
    service: Service,
    server: Server,
    listener: socket.socket,
    say: Callable[[str], None],
    notes: Sequence[str],
) -> int:
    signals = Signals(asyncio.get_running_loop())
    service.start()
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(0.001)
    if proofs := [model.proof for model in service.generators.values()]:
        await asyncio.wait(proofs, timeout=PROOF)
    for line in (greeting(service, listener, secure=server.secure), *notes):
        say(line)
    try:
        while not signals.first.is_set() and not service.died and not serving.done():
            await _wait(signals.first, 0.25)
        await _drain(service, signals)
    finally:
        died = service.died
        service.stop()
        server.should_exit = True
        await serving
        signals.remove()
    return 1 if died else 0


async def _drain(service: Service, signals: Signals) -> None:
    """Readiness goes first, what was admitted is finished; a second signal or the limit cuts it short."""
    service.drain()
    began = time.monotonic()
    while (spent := time.monotonic() - began) < service.limits.drain_seconds and not service.died:
        if signals.second.is_set() or (service.idle and spent > LINGER):
            return
        await _wait(signals.second, 0.01)


async def _wait(event: asyncio.Event, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)


def _print(line: str) -> None:
    """To whoever starts servers; a full disk under it is no reason not to serve."""
    try:
        print(line, flush=True)
    except OSError as error:
        log.warning("could not say: %s (%s)", line, error.strerror)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - else its flush would fail again, at the end
