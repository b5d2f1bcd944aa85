"""`infer serve` and `infer top`: their arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from . import serving_options
from .arguments import Trust
from .serving_options import Nonfinite


def serve(
    artifacts: Annotated[list[Path], typer.Argument(metavar="ARTIFACT...")],
    host: Annotated[str, typer.Option(help="address to bind")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535)] = 8000,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    max_delay_ms: Annotated[float, typer.Option(help="wait this long for a batch to fill", min=0)] = 0.0,
    drain: Annotated[
        float, typer.Option(help="seconds to finish accepted requests on SIGTERM", min=0)
    ] = 30.0,
    api_key: Annotated[
        list[str] | None,
        typer.Option(envvar="INFER_API_KEY", help="clients must send one of these; may be said again"),
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="one key a line, in a file that nobody else may read")
    ] = None,
    ssl_certfile: Annotated[Path | None, typer.Option(help="PEM; the port then speaks HTTPS")] = None,
    ssl_keyfile: Annotated[Path | None, typer.Option(help="PEM; default: in the certificate's file")] = None,
    ssl_keyfile_password: Annotated[str | None, typer.Option(envvar="INFER_SSL_KEYFILE_PASSWORD")] = None,
    limit: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="any limit of docs/limits.md")
    ] = None,
    nonfinite: Annotated[
        Nonfinite, typer.Option(help="outputs that are NaN or infinite: as strings in JSON, or an error")
    ] = Nonfinite.string,
    anonymous: Annotated[
        bool, typer.Option(help="let anybody in on an address that is not loopback")
    ] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="what requests may say as Host beside localhost, where no key is needed; '*': anything",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="of a language model's KV cache, like 2GiB; default: a share of what is free"),
    ] = None,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(help="of a language model: bounds how long a prompt holds up others", min=1)
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant",
            help="of a language model: no request changes a bit of another's answer; slower, nothing is batched",
        ),
    ] = False,
    share_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--share-prefix-cache",
            help="of a language model: across API keys; clients then see what prompts of others began with",
        ),
    ] = False,
    lora: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FOLDER", help="an adapter of PEFT's format; clients ask for it as a model"
        ),
    ] = None,
    replicas: Annotated[
        int, typer.Option(help="worker processes of each model of tensors, behind one queue", min=1)
    ] = 1,
    in_process: Annotated[
        bool, typer.Option("--in-process", help="run the models in the server's own process")
    ] = False,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="deploy on Ray Serve: replicas on the nodes of a cluster (extra ray)"),
    ] = False,
    ray_address: Annotated[
        str | None,
        typer.Option(help="of the cluster: auto, HOST:6379, ray://HOST:10001; default: a new one here"),
    ] = None,
    max_replicas: Annotated[
        int | None,
        typer.Option(help="with --ray: as many, when requests wait; --replicas is the least", min=1),
    ] = None,
    num_cpus: Annotated[float, typer.Option(help="with --ray: CPUs of one replica", min=0)] = 1.0,
    num_gpus: Annotated[float, typer.Option(help="with --ray: GPUs of one replica", min=0)] = 0.0,
    ray_config: Annotated[
        Path | None, typer.Option(help="with --ray: write the file for `serve deploy` here, deploy nothing")
    ] = None,
    log_requests: Annotated[
        bool,
        typer.Option(help="one line of JSON on stderr for every request to a model, and for every refusal"),
    ] = True,
    log_bodies: Annotated[
        bool,
        typer.Option("--log-bodies", help="also what was asked: for debugging, it shows what people wrote"),
    ] = False,
    otel: Annotated[
        bool, typer.Option("--otel", help="send traces; where to, say OTEL_EXPORTER_OTLP_ENDPOINT and such")
    ] = False,
    allow_reload: Annotated[
        bool, typer.Option("--allow-reload", help="let clients load and unload models of these folders")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="what all models may take, like 8GiB; default: what is free")
    ] = None,
    timings: Annotated[bool, typer.Option("--timings", help="say what the start took, by phase")] = False,
    trust_code: Trust = False,
) -> None:
    """Serve artifacts over HTTP: tensors (KServe v2), text and embeddings (OpenAI), health and metrics."""
    from .. import serve as serving
    from . import options

    keys = serving_options.keys(api_key, api_key_file)
    if ray or ray_address or ray_config:
        from . import raying

        raying.refuse(
            {
                "--ssl-certfile": ssl_certfile,
                "--ssl-keyfile": ssl_keyfile,
                "--allow-host": allow_host,
                "--lora": lora,
                "--memory": memory,
                "--allow-reload": allow_reload,
                "--timings": timings,
            }
        )
        asked = raying.asked(
            artifacts,
            replicas=replicas,
            max_replicas=max_replicas,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            in_process=in_process,
            threads=threads,
            api_key=keys,
            limits=serving_options.limits(limit, refuse_nonfinite=nonfinite == Nonfinite.error),
            max_delay_us=int(max_delay_ms * 1000),
            drain=drain,
            kv_memory=kv_memory,
            max_tokens_per_step=max_tokens_per_step,
            batch_invariant=batch_invariant,
            share_prefix_cache=share_prefix_cache,
            trust_code=trust_code,
            observing=serving.Observing(requests=log_requests, bodies=log_bodies, traces=otel),
        )
        raise typer.Exit(raying.run(asked, ray_address, host, port, ray_config, anonymous=anonymous))
    raise typer.Exit(
        serving.run(
            [str(a) for a in artifacts],
            host=host,
            port=port,
            threads=threads,
            api_key=keys,
            tls=serving_options.tls(ssl_certfile, ssl_keyfile, ssl_keyfile_password),
            limits=serving_options.limits(limit, refuse_nonfinite=nonfinite == Nonfinite.error),
            anonymous=anonymous,
            allow_hosts=allow_host or (),
            max_delay_us=int(max_delay_ms * 1000),
            drain=drain,
            kv_memory=kv_memory,
            max_tokens_per_step=max_tokens_per_step,
            batch_invariant=batch_invariant,
            share_prefix_cache=share_prefix_cache,
            lora=options.parse_named(lora or [], "--lora"),
            replicas=replicas,
            in_process=in_process,
            timings=timings,
            allow_reload=allow_reload,
            memory=memory,
            trust_code=trust_code,
            observing=serving.Observing(requests=log_requests, bodies=log_bodies, traces=otel),
        )
    )


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
