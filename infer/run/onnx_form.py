"""Form in which an ONNX source runs: the file's own graph, or a torch program imported from it.

The file stays where the backends asked for take it as it is. Where they do not - torch's own backends, formats that
quantize layers - the program is captured, quantized and lowered like that of a torch source. int8 and fp16 have both
forms: in the file's own graph the weights are codes that the runtime decodes when it opens it, so that it is as fast as
the file, at a quarter or half of its size. Which of them is tried first depends on whether integer products can gain
anything here; the other one follows where the first is refused. ONNX Runtime without optimizations on the user's own
file judges both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Literal

import torch

from .. import device as hardware
from .. import load, plugins
from ..errors import NotUsableError
from ..graph.program import OnnxGraph
from ..graph.typical_inputs import typical_inputs
from ..onnx import ort_session
from ..onnx.source import AXIS_OPSET, FORMATS
from ..plan import Plan
from ..reporter import Reporter
from ..spec import Finding
from .float_graph import as_file
from .try_backends import candidates

Form = Literal["file", "program"]
# Of a call's time, from which on integer products are tried first: twice as fast there, the model gains a fifth.
ENOUGH = 1 / 3
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "FusedGemm", "Attention", "MultiHeadAttention")
_CONVOLUTIONS = ("Conv", "FusedConv", "NhwcFusedConv")


def choose(
    plan: Plan, loaded: load.LoadedModel, reporter: Reporter, form: Form | None = None
) -> load.LoadedModel:
    """Return an ONNX source with its torch module where it is to run as a program: as `form` says, by default the first
    of `forms`; a finding says so, or why there is none.
    """
    if loaded.file is None or loaded.module is not None:
        return loaded
    order = forms(plan, loaded)
    form = form or next(iter(order))
    if form == "file":
        if len(order) > 1:
            reporter.found([Finding("load", "form", "ONNX", why=order["file"])])
        return loaded
    from ..load import module_copies, onnx_program

    try:
        module = onnx_program.import_onnx(loaded.file, loaded.outputs)
    except NotUsableError as error:
        return as_file(loaded, str(error), reporter)
    reporter.found([Finding("load", "form", "torch program", why=f"imported from ONNX: {order['program']}")])
    return replace(loaded, module=module, rebuild=partial(module_copies.copy_structure, module))


def forms(plan: Plan, loaded: load.LoadedModel) -> Mapping[Form, str]:
    """Return the forms that an ONNX source may take for this plan, the first to try first, each with the reason.

    Unquantized it stays a file where any backend takes it, quantized where each does; formats that its weights can be
    stored in have both forms. Codes that a file holds are kept.
    """
    if loaded.file is None or (plan.quant_name == "int8" and loaded.meta.get("quantized")):
        return {"file": ""}
    outputs = tuple(loaded.meta.get("outputs", ()))
    graph = OnnxGraph(loaded.inputs, outputs, loaded.samples, loaded.sizes, loaded.task, path=loaded.file)
    here = [name for name in candidates(plan) if plugins.why_not("backends", name) is None]
    refusals = [
        f"{name}: {reason}"
        for name in here
        if (reason := plugins.get("backends", name).refuses(graph, plan.with_(backend=name))) is not None
    ]
    if len(refusals) == len(here) or (plan.quant != "none" and refusals and not _is_stored(plan)):
        return {"program": refusals[0]} if refusals else {"file": ""}
    if not _is_stored(plan):
        opset = int(loaded.meta.get("opset", AXIS_OPSET))
        old = plan.quant_name == "int8" and opset < AXIS_OPSET
        return (
            {"program": f"opset {opset} has no int8 weights with a scale per channel"}
            if old
            else {"file": ""}
        )
    why, gains = "", False
    if plan.quant == "int8":
        why, gains = _integer_gain(plan, loaded, torch_too=bool(refusals))
    stays = "its weights are decoded when it is opened"
    both: list[tuple[Form, str]] = [
        ("file", f"{why}; {stays}" if why else stays),
        ("program", why or "its layers are quantized one by one"),
    ]
    return dict(reversed(both) if gains else both)


def other(plan: Plan, loaded: load.LoadedModel, *, unfaithful: bool) -> Form | None:
    """Return the form to try after the one that `loaded` has was refused, or None.

    After the file this is the program, whose layers get formats of their own, where its answers were at fault: it was
    tried first because a program has no speed to gain.
    """
    order = forms(plan, loaded)
    now: Form = "file" if loaded.module is None else "program"
    left = list(order)[list(order).index(now) + 1 :] if now in order else []
    return left[0] if left and (unfaithful or now == "program") and "unimported" not in loaded.meta else None


def _is_stored(plan: Plan) -> bool:
    """Return whether the plan's format can be given to the weights of a file, whose layers are all treated alike."""
    alike = not (plan.layers or plan.bits is not None or plan.max_drop is not None or plan.recover)
    return plan.quant in FORMATS and plan.device == "cpu" and alike


def _integer_gain(plan: Plan, loaded: load.LoadedModel, *, torch_too: bool) -> tuple[str, bool]:
    """Return what part of a call a program could speed up, in words, and whether that is enough to try it first.

    That are convolutions where the CPU multiplies int8, and products where torch's backends are asked for too: those of
    a file are integers in ONNX Runtime as well.
    """
    if not loaded.operator_seconds:
        loaded.operator_seconds.update(_operator_seconds(plan, loaded))
    seconds, total = loaded.operator_seconds, sum(loaded.operator_seconds.values())
    able = [*(_CONVOLUTIONS * hardware.has_vnni()), *(_PRODUCTS * torch_too)]
    share = sum(seconds.get(name, 0.0) for name in able) / total if total else 0.0
    return f"integer products could speed up {share:.0%} of a call", share >= ENOUGH


def _operator_seconds(plan: Plan, loaded: load.LoadedModel) -> Mapping[str, float]:
    """Time the operators of the file on a small batch; an empty mapping where ONNX Runtime does not run it."""
    inputs = typical_inputs(loaded.inputs, loaded.samples, loaded.sizes, min(plan.batches, default=1))
    if loaded.file is None or any(value.dtype == torch.bfloat16 for value in inputs.values()):
        return {}
    arrays = {name: value.contiguous().numpy() for name, value in inputs.items()}
    try:
        return ort_session.operator_seconds(loaded.file, arrays)
    except NotUsableError:
        return {}


def form(plan: Plan, loaded: load.LoadedModel) -> str:
    """Return the form that a plan needs of a source that is open: "file", "program", or "" of any but an ONNX file."""
    if loaded.kind != "onnx":
        return ""
    return "file" if "unimported" in loaded.meta else next(iter(forms(plan, loaded)))
