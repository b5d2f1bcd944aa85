"""OpenVINO backend: the program exported to ONNX and converted, our integer weights as its compressed constants. An IR
of the user's is copied as it is.

No steps of language models: its attention over a paged KV cache takes no cache from outside in place.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec
import torch

from infer import device as hardware
from infer.coverage import Coverage
from infer.errors import ArtifactError, NotUsableError
from infer.graph import storage
from infer.graph.program import Graph, OnnxGraph, OpenvinoGraph
from infer.onnx import decompositions, packages
from infer.onnx import export as exporter
from infer.onnx.layers.operands import group_of_any_table
from infer.onnx.source import OPTION, WEIGHTS
from infer.plan import Plan
from infer.results import LayerForm, Lowered
from infer.spec import Finding

from .layers import LayerConverter
from .library import library
from .model import (
    NumericSettings,
    OpenvinoRunner,
    compiled,
    count_executed_ops,
    read_converted_model,
    require_compilable,
)

EXECUTES_CODE = False
PORTABLE = True
STEPS = False
CODES = False
MODEL = Path("compiled") / "model.xml"
SETTINGS = Path("compiled") / "openvino.json"
OPTIONS = {OPTION: WEIGHTS}


def missing() -> str | None:
    """Return the first required package that is not installed, with its install command, or None."""
    return packages.missing("openvino", "openvino")


def refuses(graph: Graph, plan: Plan) -> str | None:
    """Refuse GPUs, steps of language models, bfloat16 without units for it, and formats that a file does not take."""
    if not plan.device.startswith("cpu"):
        return f"OpenVINO runs on CPUs only here, not on {plan.device}"
    if any(spec.name in ("state_cache", "kv_cache") for spec in graph.inputs):
        return "a step over a cache can't be run in place by OpenVINO; use --backend ort, inductor or eager"
    if reason := decompositions.refused(graph.nodes):
        return reason
    if plan.dtype == "bfloat16" and not hardware.has_bfloat16():
        return "this CPU has no bfloat16 units (AVX-512 BF16 or AMX); use --dtype fp32"
    if plan.quant == "int8:static" and not hardware.has_vnni():
        return "int8 products saturate on a CPU without VNNI and give wrong sums; use --quant int8"
    if isinstance(graph, OpenvinoGraph):
        return _ir_refusal(plan)
    if isinstance(graph, OnnxGraph):
        from infer.onnx.source import onnx_source

        return onnx_source.refusal(graph, plan)
    return None


def _ir_refusal(plan: Plan) -> str | None:
    """Return why the plan's format or dtype can't be given to an IR, which is copied as it is."""
    if plan.quant != "none":
        return (
            f"an OpenVINO IR runs as it is, with --quant none: {plan.quant} is chosen layer by layer on the model that "
            "it was converted from, so give that one"
        )
    if plan.dtype not in ("float32", "auto"):
        return f"an OpenVINO IR keeps its own dtype; --dtype {plan.dtype} needs the model that it was converted from"
    return None


def searched_dtypes() -> tuple[str, ...]:
    """Return the dtypes besides float32 that are fast on this CPU: a search tries them."""
    return ("bfloat16",) if hardware.has_bfloat16() else ()


def target(device: str) -> dict[str, str]:
    """Return no constraints: the model runs on any CPU, and is compiled when it is opened."""
    return {}


def layer_form(tensors: Mapping[str, torch.Tensor]) -> LayerForm | None:
    """Return the one form of all tables that are not evenly spaced; None for any other packed weight."""
    group = group_of_any_table(tensors)
    return None if group is None else LayerForm(f"codes, int8 blocks of {group}")


def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
    """Write compiled/model.xml, its weights and its settings; the findings list the layers that OpenVINO runs."""
    path, layers = folder / MODEL, LayerConverter()
    coverage: Coverage | None = None
    more_exact: tuple[tuple[str, str], ...] = ()
    path.parent.mkdir(parents=True, exist_ok=True)
    precision = "bf16" if plan.dtype == "bfloat16" else "f32"
    if isinstance(graph, OpenvinoGraph):
        _copy_ir(graph.path, path)
        require_compilable(path, NumericSettings(precision))  # anyone may have written it
    else:
        coverage, more_exact = _convert(graph, plan, path, layers, precision)
    settings = NumericSettings(precision, layers.group, layers.num_static > 0, coverage is not None)
    (folder / SETTINGS).write_bytes(msgspec.json.encode(settings))
    start = time.perf_counter()
    nodes = count_executed_ops(compiled(path, settings))
    seconds = time.perf_counter() - start
    size = sum(file.stat().st_size for file in (path, path.with_suffix(".bin")))
    fused = ", ".join(f"{count} {name}" for name, count in nodes.most_common(6))
    findings = [
        _finding("model", size, "B"),
        _finding("layers", nodes.total(), why=fused),
        _finding(
            "compiled in", seconds, "s", "at every opening: the plugin packs weights for the CPU at hand"
        ),
        *_precision_findings(plan, settings),
        *(_finding(f"layers as {form}", count) for form, count in sorted(layers.done.forms.items())),
    ]
    if layers.columns or layers.groups:
        findings.append(_group_finding(layers))
    return Lowered(findings, coverage, more_exact)


def _convert(
    graph: Graph, plan: Plan, path: Path, layers: LayerConverter, precision: str
) -> tuple[Coverage | None, tuple[tuple[str, str], ...]]:
    """Write the IR of a program or of an ONNX source, by way of an ONNX file, with its coverage and `more_exact`."""
    coverage: Coverage | None = None
    more_exact: tuple[tuple[str, str], ...] = ()
    with tempfile.TemporaryDirectory(dir=path.parent) as work:
        source = Path(work) / "model.onnx"
        if isinstance(graph, OnnxGraph):
            coverage, more_exact = _write_file(graph, plan, source)
            require_compilable(source, NumericSettings(precision))  # no exporter of torch has seen it
        else:
            exporter.save(exporter.to_ir(graph), source)
        model = read_converted_model(source, layers)
        library().save_model(model, path, compress_to_fp16=False)
        del model  # maps the file
    return coverage, more_exact


def _copy_ir(source: Path, path: Path) -> None:
    """Copy an IR and its weights, which one without any weights lacks."""
    shutil.copyfile(source, path)
    weights = source.with_suffix(".bin")
    if weights.is_file():
        shutil.copyfile(weights, path.with_suffix(".bin"))
    else:
        path.with_suffix(".bin").touch()


def _write_file(
    graph: OnnxGraph, plan: Plan, path: Path
) -> tuple[Coverage | None, tuple[tuple[str, str], ...]]:
    """Write the file of an ONNX source, as it is or with its weights in the plan's format."""
    from infer.onnx.source import onnx_source

    if plan.quant == "none":
        onnx_source.copy(graph.path, path)
        return None, ()
    # Activations stay float: what an artifact multiplies is the same with and without VNNI.
    format, rows = onnx_source.weight_format(plan), onnx_source.few_rows(graph)
    _, coverage = onnx_source.quantize(graph.path, path, None, format=format, rows=rows)
    return coverage, onnx_source.more_exact(plan)


def open(folder: Path, device: str) -> OpenvinoRunner:
    """Open compiled/model.xml, named and typed by the artifact's signature.

    Raises `NotUsableError` for int8 products on a CPU without VNNI, `ArtifactError` for a damaged file.
    """
    signature = storage.load_signature(folder)
    settings = msgspec.json.decode((folder / SETTINGS).read_bytes(), type=NumericSettings)
    if settings.vnni and not hardware.has_vnni():
        raise NotUsableError(
            "this artifact multiplies int8 by int8, which saturates on a CPU without VNNI",
            hint="Make it again here, with --quant int8 or --backend ort",
        )
    try:
        return OpenvinoRunner(folder / MODEL, signature.inputs, signature.outputs, settings)
    except NotUsableError as error:
        raise ArtifactError(error.message, where=str(folder / MODEL)) from error


def _finding(what: str, value: float | str, unit: str = "", why: str = "") -> Finding:
    return Finding("lower", f"openvino {what}", value, unit, why)


def _precision_findings(plan: Plan, settings: NumericSettings) -> list[Finding]:
    """Report the compute dtype where it isn't the one that was asked for, or isn't float32."""
    if plan.dtype == "float16":
        return [_finding("arithmetic", "float32", why="float16 on disk only: this CPU computes in float32")]
    if settings.precision == "bf16":
        return [_finding("arithmetic", "bfloat16", why="float operators; their sums are float32")]
    return []


def _group_finding(layers: LayerConverter) -> Finding:
    group = layers.group
    if not group:
        why = "weight-only layers need float activations, and one setting holds for the whole model"
        return _finding("activations", "float", why=why)
    why = f"symmetric int8, a scale for each {group} columns of a row"
    uneven = sorted(columns for columns in layers.columns if columns % group)
    if uneven:
        why += f"; in float for layers of {', '.join(map(str, uneven))} columns, which are no multiple"
    if not hardware.has_vnni():
        why = "the plugin quantizes activations only on CPUs with VNNI: float here"
    return _finding("activations in groups of", group, why=why)
