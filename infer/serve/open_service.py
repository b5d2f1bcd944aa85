"""Service of the models that `ServeOptions` name: opened, bounded in memory and connections, with keys and TLS."""

from __future__ import annotations

import contextlib
import logging
import ssl

from ..errors import UsageError
from .http.access_control import read_key_file
from .http.listener import fit_connections, tls_context
from .model_admin import ModelAdmin, check_all
from .model_repository import ModelRepository
from .observability.request_log import attach
from .options import ServeOptions
from .service import Service
from .workers.model_loading import ModelLoader

log = logging.getLogger("infer.serve")


def api_keys(options: ServeOptions) -> list[str] | None:
    """Return the API keys of the options and of the key file; None for none."""
    named = list(options.api_key)
    return [*named, *(read_key_file(options.api_key_file) if options.api_key_file else [])] or None


def tls_of(options: ServeOptions) -> ssl.SSLContext | None:
    """Return the TLS settings of the options; None for plain HTTP. Raises `UsageError` for a key alone."""
    if options.ssl_certfile is not None:
        return tls_context(options.ssl_certfile, options.ssl_keyfile, options.ssl_keyfile_password)
    if options.ssl_keyfile is not None:
        raise UsageError("--ssl-keyfile needs a certificate", hint="Give --ssl-certfile too")
    return None


def open_service(
    options: ServeOptions, repository: ModelRepository, keys: list[str] | None, stack: contextlib.ExitStack
) -> tuple[Service, ModelAdmin | None]:
    """Open the latest version of every model, which `stack` closes; return their service, its admin if asked for."""
    chosen, replicas = repository.latest(), options.replicas
    if options.lora and len(chosen) != 1:
        raise UsageError(f"expected one model with --lora, got {len(chosen)}", where="--lora")
    bounds, warning = fit_connections(
        options.bounds, len(chosen) * replicas * (2 if options.allow_reload else 1)
    )
    if warning is not None:
        log.warning("%s", warning)
    caches = check_all(chosen, replicas, options.memory, options.kv_memory)
    loader = ModelLoader(options.load_options, replicas, options.in_process, bounds.watchdog_seconds, caches)
    models = loader.open(chosen, stack)
    service = Service(models, bounds, api_key=keys, share_prefix_cache=options.share_prefix_cache)
    attach(service, requests=options.log_requests, bodies=options.log_bodies, traces=options.otel)
    if not options.allow_reload:
        return service, None
    admin = ModelAdmin(
        service,
        repository,
        loader.begin,
        replicas=replicas,
        memory=options.memory,
        kv_memory=options.kv_memory,
        caches=caches,
    )
    stack.callback(admin.close)
    return service, admin
