"""`infer optimize`: its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..plan import Plan
from .arguments import AsJson, Trust


def optimize(
    source: Annotated[str, typer.Argument(help=".pt, .pt2, .safetensors, .onnx, or a Hugging Face folder")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="artifact to write; default: NAME.infer here")
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, eager, inductor, ort, trt")] = "auto",
    quant: Annotated[
        str,
        typer.Option(
            help="none, int8[:weight|:static], nf4[:16], int4[:16], fp4[:16], fp8, cluster[:2|:3|:4|:6]"
        ),
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
    no_golden: Annotated[
        bool,
        typer.Option(
            "--no-golden",
            help="store no row of --data in the artifact; its self-test runs on synthetic inputs instead of two rows",
        ),
    ] = False,
    calibrate: Annotated[
        str,
        typer.Option(
            help="use of real inputs when quantizing: none, diagonal (weighs columns), gptq (error feedback, the most "
            "faithful and slowest), auto (gptq where there are rows that do not judge the result)"
        ),
    ] = "auto",
    task: Annotated[
        str,
        typer.Option(
            help="of a language model: auto (generate where it can, else score whole windows), generate (refuse a "
            "model that can't), score"
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
    allow_partial: Annotated[
        bool, typer.Option(help="keep a result of which less than a tenth of the weights is quantized")
    ] = False,
    force: Annotated[bool, typer.Option(help="replace an existing artifact")] = False,
    plan: Annotated[
        Path | None, typer.Option(help="take everything from this manifest.json or plan file")
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write a profiler trace here (open it in Perfetto)")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="print every finding and all tables")] = False,
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
        golden=not no_golden,
        task=task,
        load=load,
        batches=batch,
        max_batch=max_batch,
        max_length=max_length,
        max_error=max_error,
        threads=threads,
        trust_code=trust_code,
        allow_slower=allow_slower,
        allow_partial=allow_partial,
    )
    made: Plan = options.read_plan(plan, source) if plan else asked
    target = output or options.default_output(source)
    with show.watching(quiet=as_json, verbose=verbose) as watch:
        outcome = pipeline.optimize(made, target, watch=watch, replace=force)
    show.verdict(outcome.report, as_json=as_json, path=outcome.path, verbose=verbose)
    if profile:
        from .. import bench

        bench.profile(outcome.path, profile)
        Console(stderr=True).print(f"profile: {profile} (open it at ui.perfetto.dev)")
