"""The least time that a call can take here: its bytes over the bandwidth, or its operations over the peak.

Williams et al. 2009, "Roofline". Weights are read once a call, whatever the batch; tables that are looked up, and
activations, are left out, so the floor is a little too low and a share of it a little too modest. The bandwidth is the
caches' for a model that stays in them from one call to the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from .. import device as hardware
from ..capture import Graph
from ..generate import StepShape
from ..generate.windows import CONTEXT
from ..plan import Plan
from ..spec import Finding
from ..thresholds import precision_class

IN_CACHE = 1.5  # times the memory's bandwidth: then what is read stays in a cache
IN_CACHE_WORDS = "in cache"


class Floor(msgspec.Struct, frozen=True):
    """`seconds` is what `bound` ("memory" or "compute") allows at best."""

    seconds: float
    bound: str


def floor(num_bytes: int, flops: int | None, bandwidth: float, peak: float) -> Floor:
    """max(bytes / bandwidth, flops / peak); bytes/s and operations/s. Unknown operations leave the bytes."""
    reading = num_bytes / bandwidth
    computing = (flops or 0) / peak
    return Floor(max(reading, computing), "memory" if reading >= computing else "compute")


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
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops()) or None


def _batched(graph: Graph) -> bool:
    return all(s.shape and s.shape[0] == "batch" for s in graph.inputs)


def _one_call(graph: Graph) -> int | None:
    if graph.program is None:
        return None
    batched = _batched(graph)
    rows = {name: value[:1] if batched else value for name, value in graph.samples.items()}
    return count_flops(lambda: graph.run(rows))


def multiply_peak(plan: Plan) -> tuple[float, str]:
    """Operations per second of the plan's arithmetic, and how that number came about."""
    dtype = plan.dtype if plan.dtype in ("float32", "float16", "bfloat16") else "float32"
    peak = hardware.peak_flops(plan.device, dtype)
    if plan.device != "cpu" or precision_class(plan.quant, plan.dtype) == plan.dtype:
        return peak, f"measured {dtype} matmul"
    # An instruction multiplies 64 int8 pairs against 16 float32 ones; without VNNI it takes three.
    factor = 4.0 if hardware.has_vnni() or "dotprod" in hardware.isa() else 4 / 3
    return peak * factor, f"{factor:.2g} x the measured {dtype} matmul, for int8 products"


def probe(
    graph: Graph,
    weight_bytes: int,
    plan: Plan,
    *,
    batches: Sequence[int] | None = None,
    shape: StepShape | None = None,
) -> list[Finding]:
    """The ceiling of an artifact: weight bytes, bandwidth, peak, and the floor at each batch size.

    `graph` is the float original: its operations are what has to be computed, however they are packed. With `shape`
    what counts is a decode step: the operations of one token of each sequence, and its cache read besides.
    """
    memory_speed = hardware.read_bandwidth(plan.device)
    peak, how = multiply_peak(plan)
    findings = [
        Finding("ceiling", "weight bytes", weight_bytes, "B", "read once a call"),
        Finding("ceiling", "read bandwidth", memory_speed, "B/s", "measured, all threads"),
        Finding("ceiling", "multiply peak", peak, "FLOP/s", how),
    ]
    once = _one_call(graph)
    if shape is not None and once is not None:
        once //= next(iter(graph.samples.values())).shape[1]
    kv_bytes = 0 if shape is None else CONTEXT * shape.layers * shape.page_bytes // shape.page
    for batch in batches or plan.batches:
        flops = None if once is None else once * (batch if _batched(graph) else 1)
        reads = weight_bytes + batch * kv_bytes
        bandwidth = hardware.bandwidth_for(reads, plan.device)
        least = floor(reads, flops, bandwidth, peak)
        work = "" if flops is None else f", {flops / 1e6:.1f} MFLOP"
        cached = bandwidth > IN_CACHE * memory_speed
        where = f" {IN_CACHE_WORDS} at {bandwidth / 1e9:.1f} GB/s" if cached else ""
        why = f"{least.bound}-bound: {reads / 1e6:.1f} MB{where}{work}"
        findings.append(Finding("ceiling", f"floor batch {batch}", least.seconds, "s", why))
    return findings


def floors(findings: Sequence[Finding]) -> Mapping[int, Finding]:
    """Batch size → the finding of its floor."""
    found = (f for f in findings if f.stage == "ceiling" and f.what.startswith("floor batch "))
    return {int(f.what.rpartition(" ")[2]): f for f in found}
