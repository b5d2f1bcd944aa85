"""Form in which an ONNX source runs: the file as it is, or a torch program imported from it.

The file stays where the backends asked for take it as it is. Where they do not - torch's own backends, formats that
quantize layers, int8 of an opset without scales for each channel - the program is captured, quantized and lowered like
that of a torch source. ONNX Runtime without optimizations on the user's own file judges both.
"""

from __future__ import annotations

from functools import partial

from .. import load, plugins
from ..errors import NotUsableError
from ..graph.program import Graph
from ..load import module_copies, onnx_program
from ..plan import Plan
from ..reporter import Reporter
from ..spec import Finding
from .float_graph import keep_file
from .try_backends import candidates

AXIS_OPSET = 13  # the first whose DequantizeLinear takes a scale for each channel


def choose(plan: Plan, loaded: load.LoadedModel, reporter: Reporter) -> None:
    """Give an ONNX source its torch module where the plan needs one; a finding says so, or why there is none."""
    if loaded.onnx is None or loaded.module is not None or not (why := needs_program(plan, loaded)):
        return
    try:
        module = onnx_program.import_onnx(loaded.onnx)
    except NotUsableError as error:
        keep_file(loaded, str(error), reporter)
        return
    loaded.module, loaded.rebuild = module, partial(module_copies.copy_structure, module)
    reporter.found([Finding("load", "form", "torch program", why=f"imported from ONNX: {why}")])


def needs_program(plan: Plan, loaded: load.LoadedModel) -> str:
    """Return why the file can't stay ONNX for this plan, or "".

    Unquantized it stays where any backend takes it, quantized where each does. Codes that a file holds are kept.
    """
    if loaded.onnx is None or (plan.quant_name == "int8" and loaded.meta.get("quantized")):
        return ""
    outputs = tuple(loaded.meta.get("outputs", ()))
    graph = Graph(loaded.inputs, outputs, loaded.samples, loaded.sizes, onnx=loaded.onnx, task=loaded.task)
    here = [name for name in candidates(plan) if plugins.why_not("backends", name) is None]
    refusals = [
        f"{name}: {reason}"
        for name in here
        if (reason := plugins.get("backends", name).refuses(graph, plan.with_(backend=name))) is not None
    ]
    if refusals and (plan.quant != "none" or len(refusals) == len(here)):
        return refusals[0]
    opset = int(loaded.meta.get("opset", AXIS_OPSET))
    old = plan.quant_name == "int8" and opset < AXIS_OPSET
    return f"opset {opset} has no int8 weights with a scale per channel" if old else ""


def form(plan: Plan, loaded: load.LoadedModel) -> str:
    """Return the form that a plan needs of a source that is open: "file", "program", or "" of a torch source."""
    if loaded.onnx is None:
        return ""
    return "program" if "unimported" not in loaded.meta and needs_program(plan, loaded) else "file"
