"""The least time that a call can take here: its bytes over the bandwidth, or its operations over the peak.

Williams et al. 2009, "Roofline". Weights are read once a call, whatever the batch; tables that are looked up, and
activations, are left out, so the floor is a little too low and a share of it a little too modest. The bandwidth is the
caches' for a model that stays in them from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import msgspec
import torch
from torch.export import ExportedProgram

from ... import device as hardware
from ... import rows
from ...fidelity.thresholds import precision_class
from ...graph.program import FileGraph, Graph, StreamedGraph
from ...graph.typical_inputs import MASK, cut, fixed_length, timed_lengths
from ...llm.step.full_sequence_runner import CONTEXT
from ...llm.step.step_shape import StepShape
from ...plan import Plan
from ...spec import Finding

IN_CACHE = 1.5  # times the memory's bandwidth: then what is read stays in a cache
Bound = Literal["memory", "compute"]


class RooflineBound(msgspec.Struct, frozen=True, kw_only=True):
    """Roofline lower bound of one call's time at a batch size; `bound` names the limiting resource.

    `in_cache`: what a call reads stays in the processor's caches, whose bandwidth is taken.
    """

    batch: int
    seconds: float
    bound: Bound
    in_cache: bool = False
    num_bytes: int | None = None  # read by a call
    flops: int | None = None  # of a call
    bandwidth: float | None = None  # bytes/s

    def finding(self) -> Finding:
        where = f" in cache at {(self.bandwidth or 0.0) / 1e9:.1f} GB/s" if self.in_cache else ""
        work = "" if self.flops is None else f", {self.flops / 1e6:.1f} MFLOP"
        why = f"{self.bound}-bound: {(self.num_bytes or 0) / 1e6:.1f} MB{where}{work}"
        return Finding("ceiling", f"floor batch {self.batch}", self.seconds, "s", why)


class MachineRoofline(msgspec.Struct, frozen=True, kw_only=True):
    """Measured bandwidth (bytes/s) and peak (FLOP/s) of this machine, and the bounds of a call's time they give."""

    weight_bytes: int
    read_bandwidth: float
    multiply_peak: float
    peak_source: str  # how `multiply_peak` came about
    floors: tuple[RooflineBound, ...]

    def floor(self, batch: int) -> RooflineBound | None:
        return next((floor for floor in self.floors if floor.batch == batch), None)

    def findings(self) -> list[Finding]:
        """List bandwidth, peak and bounds as findings for the report."""
        return [
            Finding("ceiling", "weight bytes", self.weight_bytes, "B", "read once a call"),
            Finding("ceiling", "read bandwidth", self.read_bandwidth, "B/s", "measured, all threads"),
            Finding("ceiling", "multiply peak", self.multiply_peak, "FLOP/s", self.peak_source),
            *(floor.finding() for floor in self.floors),
        ]


def least_time(num_bytes: int, flops: int | None, bandwidth: float, peak: float) -> tuple[float, Bound]:
    """max(bytes / bandwidth, flops / peak); bytes/s and operations/s. Unknown operations leave the bytes."""
    reading = num_bytes / bandwidth
    computing = (flops or 0) / peak
    return max(reading, computing), "memory" if reading >= computing else "compute"


def bytes_read(program: ExportedProgram) -> int:
    """Bytes of the weights that each call reads whole: all but the tables of embeddings, of which it reads few rows."""
    signature, read = program.graph_signature, 0
    names = signature.inputs_to_parameters | signature.inputs_to_buffers
    for node in program.graph.nodes:
        if node.op != "placeholder" or node.name not in names or not node.users:
            continue
        name = names[node.name]
        tensor = program.state_dict.get(name, program.constants.get(name))
        if isinstance(tensor, torch.Tensor) and not all(
            "embedding" in str(user.target) for user in node.users
        ):
            read += tensor.numel() * tensor.element_size()
    return read


def count_flops(call: Callable[[], object]) -> int | None:
    """Operations of one call of plain torch code, 2 per multiply-add; None when nothing in it counts."""
    from torch.utils.flop_counter import FlopCounterMode  # imports triton

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) or None


def flops_of_one_row(graph: Graph) -> int | None:
    """Count the operations of a call on one row, or on the whole input where nothing is batched."""
    if isinstance(graph, FileGraph | StreamedGraph):
        return None
    row = rows.cut(graph.inputs, graph.samples, 0, 1)
    return count_flops(lambda: graph.run(row))


def flops_of_call(graph: Graph, batch: int) -> int | None:
    """Count the operations that the inputs of `typical_inputs` need, of padding none.

    Of rows with an attention mask these are at least `batch` times those of a row of their mean length, as they grow
    faster than the length. A fixed length can't be cut: there all is taken to be quadratic, as attention is.
    """
    lengths = timed_lengths(graph.inputs, graph.samples, graph.sizes, batch)
    if lengths is None or isinstance(graph, FileGraph | StreamedGraph):
        row = flops_of_one_row(graph)
        return None if row is None else row * (batch if rows.have_rows(graph.inputs) else 1)
    mean = max(int(lengths.double().mean()), 1)
    one_row = rows.cut(graph.inputs, graph.samples, 0, 1)
    row = count_flops(lambda: graph.run(cut(one_row, graph.inputs, graph.sizes, mean)))
    if row is not None and fixed_length(graph.inputs):
        row = int(row * (mean / graph.samples[MASK].shape[1]) ** 2)
    return None if row is None else row * batch


def multiply_peak(plan: Plan) -> tuple[float, str]:
    """Operations per second of the plan's arithmetic, and how that number came about."""
    dtype = plan.dtype if plan.dtype in ("float32", "float16", "bfloat16") else "float32"
    peak = hardware.peak_flops(plan.device, dtype)
    if plan.device != "cpu" or precision_class(plan.quant, plan.dtype) == plan.dtype:
        return peak, f"measured {dtype} matmul"
    # An instruction multiplies 64 int8 pairs against 16 float32 ones; without VNNI it takes three.
    factor = 4.0 if hardware.has_vnni() or "dotprod" in hardware.isa() else 4 / 3
    if hardware.why_no_amx() is None:
        factor = 32.0  # a product of tiles is 1,024 pairs a cycle, against 32 float32 ones
    return peak * factor, f"{factor:.2g} x the measured {dtype} matmul, for int8 products"


def probe(
    graph: Graph,
    weight_bytes: int,
    plan: Plan,
    *,
    batches: Sequence[int] | None = None,
    shape: StepShape | None = None,
) -> MachineRoofline:
    """Compute the ceiling of an artifact that reads `weight_bytes` a call, with the floor at each batch size.

    `graph` is the float original: its operations are what has to be computed, however they are packed. With `shape`
    what counts is a decode step: the operations of one token of each sequence, and its cache and state read besides.
    """
    memory_speed = hardware.read_bandwidth(plan.device)
    peak, how = multiply_peak(plan)
    kv_bytes, step_flops = 0, None
    if shape is not None:
        if (
            shape.source is None
        ):  # the whole of an encoder-decoder holds the encoder's, which a step does not run
            whole = flops_of_one_row(graph)
            step_flops = None if whole is None else whole // next(iter(graph.samples.values())).shape[1]
        kv_bytes = CONTEXT * shape.layers * shape.page_bytes // shape.page + shape.state_bytes
    floors = []
    for batch in batches or plan.batches:
        if shape is None:
            flops = flops_of_call(graph, batch)
        else:
            flops = (
                None if step_flops is None else step_flops * (batch if rows.have_rows(graph.inputs) else 1)
            )
        reads = weight_bytes + batch * kv_bytes
        bandwidth = hardware.bandwidth_for(reads, plan.device)
        seconds, bound = least_time(reads, flops, bandwidth, peak)
        floors.append(
            RooflineBound(
                batch=batch,
                seconds=seconds,
                bound=bound,
                in_cache=bound == "memory" and bandwidth > IN_CACHE * memory_speed,
                num_bytes=reads,
                flops=flops,
                bandwidth=bandwidth,
            )
        )
    return MachineRoofline(
        weight_bytes=weight_bytes,
        read_bandwidth=memory_speed,
        multiply_peak=peak,
        peak_source=how,
        floors=tuple(floors),
    )
