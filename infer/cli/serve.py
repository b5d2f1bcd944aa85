"""`infer serve` and `infer top`: run a server, with Ray or without, and watch one."""

from __future__ import annotations

from typing import Annotated

import typer

from ..serve.options import GROUPS, ServeOptions
from .options import takes


@takes(ServeOptions, GROUPS)
def serve(options: ServeOptions) -> None:
    """Serve artifacts over HTTP: tensors (KServe v2), text and embeddings (OpenAI), health and metrics."""
    from .. import serve as serving

    if options.ray or options.ray_address or options.ray_config:
        from ..serve import ray_run

        raise typer.Exit(ray_run.start(options))
    raise typer.Exit(serving.start(options))


def top(
    url: Annotated[str, typer.Argument(help="of a running server")] = "http://127.0.0.1:8000",
    api_key: Annotated[
        str | None, typer.Option(envvar="INFER_API_KEY", help="if the server asks for one")
    ] = None,
    interval: Annotated[float, typer.Option(help="seconds between two looks", min=0.2)] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="print one table and leave")] = False,
) -> None:
    """Watch a running server: throughput, latency, queue, batches and memory of each model."""
    from .top import watch

    watch(url, api_key, interval, once=once)
