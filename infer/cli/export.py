"""`infer export`: a model in the format of another engine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .options import AsJson


def export(
    source: Annotated[
        str,
        typer.Argument(metavar="SOURCE", help="a Hugging Face folder, a GGUF file or an artifact"),
    ],
    to: Annotated[str, typer.Option("--to", help="gguf, hf, compressed-tensors or onnx")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file (gguf) or folder to write")],
    kind: Annotated[
        str,
        typer.Option(
            "--type",
            help="type of the matrices: F32, F16, BF16, Q8_0, Q4_0, Q4_1 or keep (gguf, default F16), F32, F16 or BF16 "
            "(hf, default BF16), int4, int8 or keep (compressed-tensors, default int4); keep carries codes over and is "
            "the default of quantized sources",
        ),
    ] = "",
    force: Annotated[bool, typer.Option(help="replace an existing output")] = False,
    as_json: AsJson = False,
) -> None:
    """Write SOURCE as a GGUF file or a Hugging Face folder, checked by reading it back, or as an ONNX folder."""
    from ..export import export_model
    from . import output as printed

    findings = export_model(source, to, output, kind=kind, replace=force)
    printed.print_facts(
        {finding.what: f"{_shown(finding.value)} {finding.unit}, {finding.why}" for finding in findings},
        as_json=as_json,
    )


def _shown(value: object) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
