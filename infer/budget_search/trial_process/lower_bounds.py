"""Bounds on size and time that need no trial: packed bytes of the weights, and the roofline of this machine.

All are true of every artifact, however its layers are dispatched: of the weights only matrices count, each in the
codes of the format without its scales; a call reads them once and makes its products at the peak of the machine. A
decode step of experts reads some of them, so that stacked weights do not count there. Peak and bandwidth are measured:
times are divided by `SLACK`, and by what other work on the machine took from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.export import ExportedProgram

from ... import device as hardware
from ... import plugins, rows
from ...errors import InferError
from ...plan import Plan
from ...report.measurements import roofline
from ...run.float_graph import Original
from .messages import LowerBounds

FORMATS = "infer.compress.formats"
SAMPLE = (256, 1024)  # of a weight whose codes are counted: rows, columns
SLACK = 2.0
WINOGRAD = (
    4.0  # products that a convolution may save by transforming its tiles (Lavin and Gray 2016, F(4x4, 3x3))
)


def lower_bounds(original: Original, plan: Plan, formats: Sequence[str]) -> LowerBounds:
    """Return the bounds of each format; none for sources that are not captured, or are quantized already."""
    graph, shape = original.graph, original.mode.shape
    if not original.is_in_memory or original.loaded.stored_as:
        return LowerBounds()
    lowered = original.lowered_as(shape)
    graphs = [lowered, *lowered.parts.values()]
    weights = used_matrices([one.exported for one in graphs])
    is_step = shape is not None
    count = sum(one.count for one in weights)
    read = sum(one.count for one in weights if not one.looked_up and not (is_step and one.dims > 2))
    flops = {
        batch: 2 * read * (batch if rows.have_rows(graph.inputs) else 1)
        if is_step
        else roofline.flops_of_call(graph, batch)
        for batch in plan.batches
    }
    saved = WINOGRAD if any("conv" in str(node.target) for one in graphs for node in one.nodes) else 1.0
    slack = SLACK * hardware.busy_factor(plan.device)
    found = LowerBounds()
    for name in formats:
        bits = code_bits(name, plan)
        found.size[name], found.read[name] = round(count * bits / 8), round(read * bits / 8)
        if shape is not None and shape.source is not None:
            continue  # a step reads the decoder alone
        own = plan.with_(quant=name, dtype="float32" if plan.dtype == "auto" else plan.dtype)
        peak, bandwidth = (
            roofline.multiply_peak(own)[0] * saved,
            hardware.bandwidth_for(max(found.read[name], 1), plan.device),
        )
        for batch in plan.batches:
            least = roofline.least_time(found.read[name], flops[batch], bandwidth, peak)[0]
            found.seconds.setdefault(name, {})[batch] = least / slack
    return found


def code_bits(name: str, plan: Plan) -> float:
    """Return the bits of one weight in a format, without scales and tables; 0 where its file can't say."""
    if name == "none":
        return 16.0 if plan.dtype in ("float16", "bfloat16") else 32.0
    weight = torch.linspace(-1, 1, SAMPLE[0] * SAMPLE[1]).reshape(SAMPLE)
    own = plan.with_(quant=name)
    try:
        packed = plugins.get(FORMATS, own.quant_name).quantize(weight, None, own)
    except (InferError, ValueError, RuntimeError, TypeError):  # of a plug-in: no bound is no harm
        return 0.0
    return 8 * max(tensor.nbytes for tensor in packed.values()) / weight.numel()


@dataclass(frozen=True)
class WeightMatrix:
    """A weight of two dimensions or more: its values, and True where only rows of it are looked up."""

    count: int
    dims: int
    looked_up: bool


def used_matrices(programs: Sequence[ExportedProgram]) -> list[WeightMatrix]:
    """List the weights of two dimensions or more that the programs use, each tensor once."""
    found: dict[int, WeightMatrix] = {}
    for program, node in ((one, node) for one in programs for node in one.graph.nodes):
        signature = program.graph_signature
        if node.op != "placeholder" or node.name not in signature.inputs_to_parameters or not node.users:
            continue
        tensor = program.state_dict.get(signature.inputs_to_parameters[node.name])
        if isinstance(tensor, torch.Tensor) and tensor.dim() >= 2:
            looked_up = all("embedding" in str(user.target) for user in node.users)
            before = found.get(tensor.data_ptr())
            looked_up = looked_up and (before is None or before.looked_up)
            found[tensor.data_ptr()] = WeightMatrix(tensor.numel(), tensor.dim(), looked_up)
    return list(found.values())
