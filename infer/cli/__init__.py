"""Arguments in, sentences out. Exit codes: 0 done · 1 internal · 2 usage · 3 bad file or artifact · 4 a gate refused ·
5 not usable on this machine · 6 busy or exists · 7 out of memory or disk · 130 interrupted."""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import InferError, ResourceError
from ..spec import Plan
from . import language, serving_options
from .serving_options import Nonfinite

INTERRUPTED = 130

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Shrink a trained model, lower it, check it against the original, serve it.",
)

Artifact = Annotated[
    Path, typer.Argument(metavar="ARTIFACT", help="a folder NAME.infer made by `infer optimize`")
]
AsJson = Annotated[bool, typer.Option("--json", help="print one JSON document on stdout, nothing else")]
Trust = Annotated[bool, typer.Option("--trust-code", help="open files that hold code")]


@app.command()
def optimize(
    source: Annotated[str, typer.Argument(help=".pt, .pt2, .safetensors, .onnx, or a Hugging Face folder")],
    output: Annotated[Path | None, typer.Option(help="artifact to write; default: NAME.infer here")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager, inductor, ort, trt")] = "auto",
    quant: Annotated[
        str, typer.Option(help="none, int8[:weight|:static], nf4, int4, fp4, fp8, cluster[:2|:3|:4|:6]")
    ] = "none",
    bits: Annotated[
        float | None,
        typer.Option(
            help="mixed precision: mean bits per weight of the layers that a format can take, tables and scales "
            "included, float ones in full; formats from --quant up, by measured effect on the output",
            min=1,
            max=32,
        ),
    ] = None,
    max_drop: Annotated[
        str | None,
        typer.Option(
            help="mixed precision: the smallest model that loses at most this share (0.5% or 0.005), measured without "
            "labels on held-out inputs: relative increase of perplexity of a language model, share of rows whose "
            "best class changed of a classifier, relative error of the outputs of any other; judges nothing else"
        ),
    ] = None,
    layers: Annotated[
        list[str] | None,
        typer.Option(
            "--layer", help="NAME=FORMAT pins a layer (glob; FORMAT as --quant, or float), repeatable"
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16, tf32")] = "auto",
    kv_dtype: Annotated[
        str, typer.Option(help="KV cache of a language model: auto, fp32, fp16, bf16, int8")
    ] = "auto",
    chat_template: Annotated[
        Path | None,
        typer.Option(help="Jinja file for a language model whose folder has none, or another one"),
    ] = None,
    adapters: Annotated[
        str,
        typer.Option(
            metavar="SLOTS[:RANK]", help="room for LoRA adapters in a language model, by default none"
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda")] = "auto",
    inputs: Annotated[list[str] | None, typer.Option("--input", help="NAME=DTYPE[DIMS], repeatable")] = None,
    model: Annotated[
        str | None, typer.Option(help="FILE.py:FACTORY that builds the model of a state dict")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="real inputs: .npz, .npy, .pt, text, folder, FILE.py:FN, random")
    ] = None,
    calibrate: Annotated[
        str,
        typer.Option(
            help="use of real inputs when quantizing: none, diagonal (weighs columns), gptq (error feedback, the most "
            "faithful and slowest), auto (gptq where there are rows that do not judge the result)"
        ),
    ] = "auto",
    load: Annotated[str, typer.Option(help="auto, meta, sequential, per-tensor, torch, offload")] = "auto",
    batch: Annotated[str, typer.Option(help="batch sizes that matter, timed and gated")] = "1,8",
    max_batch: Annotated[int, typer.Option(help="largest batch the graph takes", min=1)] = 64,
    max_length: Annotated[int, typer.Option(help="longest sequence the graph takes", min=1)] = 512,
    max_error: Annotated[
        float | None, typer.Option(help="allow this relative error, judge nothing else")
    ] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: all", min=1)] = None,
    trust_code: Trust = False,
    allow_slower: Annotated[bool, typer.Option(help="keep a slower result: memory was the point")] = False,
    force: Annotated[bool, typer.Option(help="replace an existing artifact")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="take everything from this manifest.json or plan file")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write a profiler trace here (open it in Perfetto)")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Turn SOURCE into an artifact that is smaller, faster and checked against the original."""
    from .. import pipeline
    from . import options, show

    asked = options.to_plan(
        source=source,
        backend=backend,
        quant=quant,
        bits=bits,
        max_drop=max_drop,
        layers=layers or (),
        calibrate=calibrate,
        dtype=dtype,
        kv_dtype=kv_dtype,
        chat_template=None if chat_template is None else str(chat_template),
        adapters=adapters,
        device=device,
        inputs=tuple(inputs or ()),
        model=model,
        data=data,
        load=load,
        batches=batch,
        max_batch=max_batch,
        max_length=max_length,
        max_error=max_error,
        threads=threads,
        trust_code=trust_code,
        allow_slower=allow_slower,
    )
    made: Plan = options.read_plan(plan, source) if plan else asked
    target = output or options.default_output(source)
    with show.watching(quiet=as_json) as watch:
        outcome = pipeline.optimize(made, target, watch=watch, replace=force)
    show.report(outcome.report, as_json=as_json, path=outcome.path)
    if profile:
        from .. import bench

        bench.profile(outcome.path, profile)
        Console(stderr=True).print(f"profile: {profile} (open it at ui.perfetto.dev)")


@app.command()
def predict(
    artifact: Artifact,
    input: Annotated[str, typer.Argument(help=".npz, .npy, .json, a text file, or - for text on stdin")],
    output: Annotated[Path | None, typer.Option(help=".npz or .json; default: JSON on stdout")] = None,
    trust_code: Trust = False,
) -> None:
    """Run an artifact on a file of inputs."""
    from ..predict import Predictor
    from . import files

    with Predictor.load(artifact, trust_code=trust_code) as predictor:
        files.write(files.answer(predictor, input), output)


app.command()(language.generate)
app.command()(language.chat)


@app.command()
def bench(
    artifact: Artifact,
    vs: Annotated[Path | None, typer.Option(help="another artifact, run in turn with this one")] = None,
    batch: Annotated[
        str | None, typer.Option(help="batch sizes; default: 1,2,4,8,16, of a language model 1,8")
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="of a language model: tokens of the prompts, like 128,512")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="of a language model: tokens decoded after each prompt", min=2)
    ] = 32,
    seconds: Annotated[float, typer.Option(help="time per batch size (and context)", min=0.05)] = 1.0,
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    output: Annotated[Path | None, typer.Option(help="also write the JSON document here")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write a profiler trace here (open it in Perfetto)")
    ] = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Latency percentiles, throughput, memory and the roofline of an artifact; tokens, of a language model."""
    from .. import bench as measuring
    from . import benching

    result = benching.measured(
        artifact,
        batch=batch,
        context=context,
        tokens=tokens,
        vs=vs,
        seconds=seconds,
        threads=threads,
        trust_code=trust_code,
    )
    if output:
        output.write_bytes(measuring.encode(result))
    if profile:
        measuring.profile(artifact, profile, trust_code=trust_code)
    benching.show(result, as_json=as_json)


@app.command()
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
    kv_memory: Annotated[
        str | None,
        typer.Option(help="of a language model's KV cache, like 2GiB; default: a share of what is free"),
    ] = None,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(help="of a language model: bounds how long a prompt holds up others", min=1)
    ] = None,
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

        asked = raying.asked(
            artifacts,
            replicas=replicas,
            max_replicas=max_replicas,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            threads=threads,
            api_key=keys,
            max_delay_us=int(max_delay_ms * 1000),
            drain=drain,
            kv_memory=kv_memory,
            max_tokens_per_step=max_tokens_per_step,
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
            max_delay_us=int(max_delay_ms * 1000),
            drain=drain,
            kv_memory=kv_memory,
            max_tokens_per_step=max_tokens_per_step,
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


@app.command()
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


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="an artifact or a model file; nothing in it is executed")],
    as_json: AsJson = False,
) -> None:
    """Say what a file or an artifact holds, from its headers alone."""
    from .. import inspection
    from . import show

    show.facts(inspection.inspect(path), as_json=as_json)


@app.command()
def verify(artifact: Artifact, trust_code: Trust = False, as_json: AsJson = False) -> None:
    """Check every hash, the signature, and the golden inputs of an artifact."""
    from .. import inspection
    from . import show

    show.facts(inspection.verify(artifact, trust_code=trust_code), as_json=as_json)


@app.command()
def doctor(as_json: AsJson = False) -> None:
    """What can run on this machine, what can't and why, and versions that clash."""
    from .. import inspection
    from . import show

    show.doctor(inspection.doctor(), as_json=as_json)


@app.command()
def report(
    artifact: Artifact,
    html: Annotated[Path | None, typer.Option(help="write the HTML page here")] = None,
    as_json: AsJson = False,
) -> None:
    """Show the report that an artifact carries."""
    from .. import inspection
    from . import show

    document = inspection.report(artifact)
    if html:
        html.write_bytes((artifact / "report.html").read_bytes())
    show.report(document, as_json=as_json, path=artifact)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; returns the exit code. Errors are one sentence on stderr."""
    signal.signal(signal.SIGTERM, _terminate)
    debug = "--debug" in (arguments if arguments is not None else sys.argv)
    given = [a for a in (arguments if arguments is not None else sys.argv[1:]) if a != "--debug"]
    try:
        result: Any = app(given, standalone_mode=False)
        if result == INTERRUPTED:  # typer turns the exception into its exit code, without a word
            raise KeyboardInterrupt
        return result if isinstance(result, int) else 0
    except KeyboardInterrupt:
        return _fail("interrupted; nothing was published", INTERRUPTED)
    except InferError as error:
        if debug:
            traceback.print_exc()
        return _fail(str(error), error.exit_code, error.code if "--json" in given else "")
    except MemoryError:
        return _fail("out of memory; try --load offload, or a machine with more", ResourceError.exit_code)
    except typer.TyperException as error:  # type: ignore[attr-defined]
        return _fail(str(error), 2)
    except Exception as error:
        if debug:
            raise
        return _fail(
            f"internal error, a bug in infer: {type(error).__name__}: {error}. --debug shows where", 1
        )


def _fail(sentence: str, code: int, kind: str = "") -> int:
    if kind:
        print(json.dumps({"error": {"code": kind, "message": sentence, "exit_code": code}}))
    print(f"infer: {sentence}", file=sys.stderr)
    return code


def _terminate(signum: int, frame: Any) -> None:
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
