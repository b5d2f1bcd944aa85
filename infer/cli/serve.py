"""`infer serve`: run a server, with Ray or without."""

from __future__ import annotations

import typer

from ..serve.options import GROUPS, ServeOptions
from .options import with_options


@with_options(ServeOptions, GROUPS)
def serve(options: ServeOptions) -> None:
    """Serve artifacts over HTTP: tensors (KServe v2), text and embeddings (OpenAI), health and metrics."""
    from .. import serve as serving

    if options.ray or options.ray_address or options.ray_config:
        from ..serve import ray_run

        raise typer.Exit(ray_run.start(options))
    raise typer.Exit(serving.start(options))
