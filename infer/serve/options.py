"""Definition of every option of `infer serve`, with Ray and without."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Literal

import msgspec

from ..errors import UsageError
from ..options import Option, option_of, values
from ..plan import SERVED, Plan
from ..spec import parse_size
from . import limits as serve_limits
from .limits import ServeLimits

NETWORK, CLIENTS, MODELS, SOURCES = "Network", "Clients", "Models", "Sources that are optimized first"
LIMITS, LLM, LOGS, RAY = "Batching and limits", "Language models", "Logs and traces", "Ray cluster"
GROUPS = (NETWORK, CLIENTS, MODELS, SOURCES, LIMITS, LLM, LOGS, RAY)  # the order of the panels of --help


class ServeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every option of the server. `infer serve`, `infer.serve.run` and Ray's configuration file take these fields."""

    artifacts: Annotated[
        tuple[str, ...],
        Option(
            "artifacts to serve, or folders that hold artifacts or versions of one; or a source, as a name on the Hub "
            "(ORG/NAME), which is optimized at its first use and kept in the cache",
            flag="",
            metavar="ARTIFACT",
            parse=values.parse_paths,
            repeat=True,
        ),
    ]
    host: Annotated[str, Option("address to listen on", group=NETWORK)] = "127.0.0.1"
    port: Annotated[
        int, Option("port to listen on; 0 takes a free one", group=NETWORK, minimum=0, maximum=65535)
    ] = 8000
    grpc_port: Annotated[
        int | None,
        Option(
            "also serve tensors over gRPC (KServe v2) on this port; 0 takes a free one (extra grpc)",
            group=NETWORK,
            minimum=0,
            maximum=65535,
        ),
    ] = None
    ssl_certfile: Annotated[
        str | None,
        Option("certificate chain (PEM); the port then speaks HTTPS only", group=NETWORK, path=True),
    ] = None
    ssl_keyfile: Annotated[
        str | None,
        Option("private key (PEM); default: in the certificate's file", group=NETWORK, path=True),
    ] = None
    ssl_keyfile_password: Annotated[
        str | None,
        Option(
            "password of the private key", group=NETWORK, envvar="INFER_SSL_KEYFILE_PASSWORD", secret=True
        ),
    ] = None
    api_key: Annotated[
        tuple[str, ...],
        Option(
            "key that clients must send; repeatable",
            group=CLIENTS,
            envvar="INFER_API_KEY",
            secret=True,
            repeat=True,
            parse=values.parse_texts,
        ),
    ] = ()
    api_key_file: Annotated[
        str | None,
        Option("file of keys, one a line, that only its owner may read", group=CLIENTS, path=True),
    ] = None
    anonymous: Annotated[
        bool, Option("serve an address that other machines reach without asking for a key", group=CLIENTS)
    ] = False
    allow_hosts: Annotated[
        tuple[str, ...],
        Option(
            "accept this Host header beside localhost where no key is asked for; '*' accepts any; repeatable",
            group=CLIENTS,
            flag="--allow-host",
            metavar="NAME",
            repeat=True,
            parse=values.parse_texts,
        ),
    ] = ()
    device: Annotated[
        str,
        Option(
            "device to run on: auto (the one an artifact was made for), cpu, cuda, cuda:N",
            group=MODELS,
            parse=values.parse_device,
        ),
    ] = "auto"
    threads: Annotated[
        int | None, Option("CPU threads of each model; default: all", group=MODELS, minimum=1)
    ] = None
    replicas: Annotated[
        int,
        Option("worker processes of each tensor model; with --ray: replicas", group=MODELS, minimum=1),
    ] = 1
    in_process: Annotated[
        bool,
        Option("run the models in the server's own process, without workers", group=MODELS, one_way=True),
    ] = False
    memory: Annotated[
        int | None,
        Option(
            "memory for all models together, like 8GiB; default: what is free",
            group=MODELS,
            metavar="SIZE",
            parse=partial(parse_size, where="--memory"),
        ),
    ] = None
    allow_reload: Annotated[
        bool, Option("let clients load and unload models of these folders", group=MODELS, one_way=True)
    ] = False
    trust_code: Annotated[
        bool, Option("open files that hold code, which then runs here", group=MODELS, one_way=True)
    ] = False
    quant: Annotated[str, option_of(Plan, "quant", group=SOURCES)] = "none"
    backend: Annotated[str, option_of(Plan, "backend", group=SOURCES)] = "auto"
    dtype: Annotated[str, option_of(Plan, "dtype", group=SOURCES)] = "auto"
    data: Annotated[str | None, option_of(Plan, "data", group=SOURCES)] = None
    max_length: Annotated[int, option_of(Plan, "max_length", group=SOURCES)] = 512
    max_delay_ms: Annotated[
        float | None,
        Option("wait so many milliseconds for a batch to fill", group=LIMITS, minimum=0, shown_default="0"),
    ] = None
    drain: Annotated[
        float | None,
        Option(
            "seconds to finish accepted requests after SIGTERM", group=LIMITS, minimum=0, shown_default="30"
        ),
    ] = None
    limits: Annotated[
        ServeLimits,
        Option(
            "set any limit of docs/limits.md; repeatable",
            group=LIMITS,
            flag="--limit",
            metavar="NAME=VALUE",
            repeat=True,
            parse=serve_limits.parse,
            format=serve_limits.format,
        ),
    ] = ServeLimits()
    nonfinite: Annotated[
        Literal["string", "error"],
        Option("send NaN and infinite outputs as strings in JSON, or answer with an error", group=LIMITS),
    ] = "string"
    kv_memory: Annotated[
        int | None,
        Option(
            "memory of the KV cache, like 2GiB; default: a share of what is free",
            group=LLM,
            metavar="SIZE",
            parse=partial(parse_size, where="--kv-memory"),
        ),
    ] = None
    max_tokens_per_step: Annotated[
        int | None,
        Option(
            "tokens of one step of the engine: fewer shorten the wait behind a long prompt; default: 512",
            group=LLM,
            minimum=1,
        ),
    ] = None
    speculation: Annotated[
        bool, Option("draft text that repeats itself, and check several tokens in one step", group=LLM)
    ] = True
    draft: Annotated[
        str | None,
        Option(
            "smaller model of the same vocabulary that drafts tokens: an artifact, or what `infer optimize` takes",
            group=LLM,
            metavar="MODEL",
        ),
    ] = None
    batch_invariant: Annotated[
        bool,
        Option(
            "bit-identical answers whatever else runs; slower, because nothing is batched",
            group=LLM,
            one_way=True,
        ),
    ] = False
    share_prefix_cache: Annotated[
        bool,
        Option(
            "share the prefix cache across API keys; response times then tell clients how prompts of others begin",
            group=LLM,
            one_way=True,
        ),
    ] = False
    tool_form: Annotated[
        str,
        Option("form in which the model writes calls of tools; auto: as its chat template shows", group=LLM),
    ] = "auto"
    reasoning_form: Annotated[
        str,
        Option(
            "form in which the model writes thoughts; auto: as its chat template shows; none: they stay in the content",
            group=LLM,
        ),
    ] = "auto"
    lora: Annotated[
        dict[str, str],
        Option(
            "LoRA adapter (a PEFT folder) that clients request as a model of this name; repeatable",
            group=LLM,
            metavar="NAME=FOLDER",
            repeat=True,
            parse=values.parse_folders,
        ),
    ] = {}
    log_requests: Annotated[
        bool,
        Option("log every request to a model, and every refusal, as a line of JSON on stderr", group=LOGS),
    ] = True
    log_bodies: Annotated[
        bool,
        Option("also log request bodies: for debugging only, they are private", group=LOGS, one_way=True),
    ] = False
    otel: Annotated[
        bool,
        Option(
            "send OpenTelemetry traces, to where OTEL_EXPORTER_OTLP_ENDPOINT says", group=LOGS, one_way=True
        ),
    ] = False
    timings: Annotated[
        bool, Option("print how long each phase of the start took", group=LOGS, one_way=True)
    ] = False
    ray: Annotated[
        bool,
        Option(
            "deploy on Ray Serve: replicas on the nodes of a cluster (extra ray)", group=RAY, one_way=True
        ),
    ] = False
    ray_address: Annotated[
        str | None,
        Option(
            "address of the cluster: auto, HOST:6379, ray://HOST:10001; default: start one here", group=RAY
        ),
    ] = None
    ray_config: Annotated[
        str | None,
        Option("write the file for `serve deploy` here, and deploy nothing", group=RAY, path=True),
    ] = None
    max_replicas: Annotated[
        int | None,
        Option("scale from --replicas up to so many while requests wait", group=RAY, minimum=1),
    ] = None
    target_requests: Annotated[
        float, Option("requests, running and waiting, that scaling keeps each replica at", group=RAY)
    ] = 16.0
    num_cpus: Annotated[float, Option("CPUs of one replica", group=RAY, minimum=0)] = 1.0
    num_gpus: Annotated[float, Option("GPUs of one replica", group=RAY, minimum=0)] = 0.0

    def __post_init__(self) -> None:
        if not self.artifacts:
            raise UsageError("nothing to serve", hint="Name at least one artifact: infer serve model.infer")

    def plan(self, source: str) -> Plan:
        """Return the plan by which a source is optimized before it is served."""
        given = {name: getattr(self, name) for name in SERVED}
        return Plan(source=source, trust_code=self.trust_code, **given)

    @property
    def bounds(self) -> ServeLimits:
        """The limits in force: `max_delay_ms`, `drain` and `nonfinite` come before `limits`."""
        own: dict[str, Any] = {"nonfinite_error": self.limits.nonfinite_error or self.nonfinite == "error"}
        if self.max_delay_ms is not None:
            own["max_delay_us"] = round(1000 * self.max_delay_ms)
        if self.drain is not None:
            own["drain_seconds"] = self.drain
        return msgspec.structs.replace(self.limits, **own)

    @property
    def load_options(self) -> dict[str, Any]:
        """The keyword arguments of `Predictor.load` for each model, as a worker process gets them."""
        names = ("device", "threads", "trust_code", "kv_memory", "max_tokens_per_step", "speculation")
        more = ("draft", "batch_invariant", "tool_form", "reasoning_form")
        named = {name: getattr(self, name) for name in (*names, *more)}
        return {**named, "adapters": self.lora} if self.lora else named
