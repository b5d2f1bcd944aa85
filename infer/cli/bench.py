"""`infer bench`: time an artifact, alone or against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..paths import writing
from .options import Artifact, AsJson, Threads, Trust


def bench(
    artifact: Artifact,
    vs: Annotated[Path | None, typer.Option(help="another artifact, timed in turns with this one")] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="batch sizes, like 1,8; default: 1,2,4,8,16, of a language model 1,8"),
    ] = None,
    context: Annotated[
        str | None, typer.Option(help="language models: prompt lengths in tokens, like 128,512")
    ] = None,
    tokens: Annotated[
        int, typer.Option(help="language models: tokens to decode after each prompt", min=2)
    ] = 32,
    seconds: Annotated[
        float, typer.Option(help="seconds to measure each batch size (and prompt length)", min=0.05)
    ] = 1.0,
    threads: Threads = None,
    output: Annotated[Path | None, typer.Option(help="also write the JSON document to this file")] = None,
    profile: Annotated[
        Path | None, typer.Option(help="write a profiler trace here (open it in Perfetto)")
    ] = None,
    trust_code: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Measure latency percentiles, throughput and memory of an artifact, against the machine's limits."""
    from .. import bench as benchmarks
    from ..predict import isolated_open
    from . import bench_tables

    for opened in (artifact, vs):
        if opened is not None:
            isolated_open.open_in_subprocess(opened, trust_code=trust_code)
    result = bench_tables.measure(
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
        with writing(output):
            output.write_bytes(benchmarks.encode(result))
    if profile:
        benchmarks.profile(artifact, profile, trust_code=trust_code)
    bench_tables.print_result(result, as_json=as_json)
