"""Portable operators → packed native ones, in a captured program that is lowered for the CPU.

`plan_packing` rewrites the program; which tensors it then wants, and from which weights they are made, is a list of
`Packing`. Layers that read the same input (q, k and v; gate and up) become one call. Attention over a paged cache
takes the same arguments natively, but another page layout: all of a program's or none. Layers over a state cache take
the same arguments and the same rows.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.export import ExportedProgram

from ...spec import KV_DTYPES, Finding
from .. import cpu
from ..cpu.weight_layout import (
    AnyPacking,
    pack,
)
from ..ops.state_space.state_cache import STATE_LAYERS
from .conv_chains import fusable
from .conv_fusion import fuse_convolutions
from .experts import KINDS as EXPERT_KINDS
from .experts import ExpertsRewriter
from .fused_program import partition
from .linear_fusion import KINDS as LINEAR_KINDS
from .linear_fusion import LinearRewriter

# Arguments without a default, and the defaults of the others.
ATTENTION_REQUIRED, ATTENTION_DEFAULTS = 15, (None, 0)
ATTENTION = "infer.attend_paged.default"
SINKS, DTYPE = 8, 11  # places of sinks and cache dtype among its arguments


def usable(program: ExportedProgram) -> bool:
    """Tell if the program has layers or attention for the native kernels, and they work here."""
    found = _wanted(program) + _attentions(program) + _state_layers(program)
    return found > 0 and cpu.why_not() is None


def _wanted(program: ExportedProgram) -> int:
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    kinds = {**LINEAR_KINDS, **EXPERT_KINDS}
    return sum(str(node.target) in kinds or fusable(node) for node in nodes)


def _attentions(program: ExportedProgram) -> int:
    return sum(map(_is_native_attention, program.graph.nodes))


def _is_native_attention(node: fx.Node) -> bool:
    """Tell if a node is attention of a cache that the native kernels have; of float8 the portable one computes."""
    if node.op != "call_function" or str(node.target) != ATTENTION:
        return False
    kind = node.args[DTYPE]
    return isinstance(kind, int) and KV_DTYPES[kind] != "float8_e4m3fn"


def _state_layers(program: ExportedProgram) -> int:
    return sum(_state_layer(node) is not None for node in program.graph.nodes)


def _state_layer(node: fx.Node) -> str | None:
    """Return the name of a layer over a state cache, None for other nodes."""
    name = str(node.target).removeprefix("infer.").removesuffix(".default")
    return name if node.op == "call_function" and name in STATE_LAYERS else None


def findings(program: ExportedProgram) -> list[Finding]:
    """Report the kernels of a program's quantized layers and attention on the CPU, and why."""
    counts = {"native layers": _wanted(program), "native attention": _attentions(program)}
    counts["native state"] = _state_layers(program)
    if not any(counts.values()):
        return []
    reason = cpu.why_not()
    why = f"portable operators, slower: {reason}" if reason else f"own kernels for {cpu.isa()}"
    return [
        Finding("lower", what, 0 if reason else count, "layers", why)
        for what, count in counts.items()
        if count
    ]


def packed(program: ExportedProgram, *, fuse_layers: bool = True) -> ExportedProgram:
    """Return `program` with packed weights and operators, as plain torch runs it."""
    planned, packings = plan_packing(program, fuse_layers=fuse_layers)
    made = pack(packings, {**program.state_dict, **program.constants})
    planned._state_dict = {**planned.state_dict, **made}
    return planned


def plan_packing(
    program: ExportedProgram, *, fuse_layers: bool = True
) -> tuple[ExportedProgram, list[AnyPacking]]:
    """Return a program that calls the packed operators, and the packing of their operands; the input is unchanged.

    Whole layers, of the step of a language model all of them, become one call, unless `fuse_layers` is false.
    """
    program, convolutions = fuse_convolutions(program)
    rewriter = _Rewriter(program)
    rewriter.pack_linear()
    rewriter.pack_experts()
    rewriter.attend()
    rewriter.keep_state()
    program = rewriter.program()
    return partition.fuse_layers(program) if fuse_layers else program, [
        *convolutions,
        *rewriter.packings,
        *rewriter.experts,
    ]


class _Rewriter(LinearRewriter, ExpertsRewriter):
    def attend(self) -> None:
        """Replace the portable attention by the native one."""
        for node in self._graph.nodes:
            if not _is_native_attention(node):
                continue
            node.target = torch.ops.infer.attend_native.default
            # In full: compiled graphs call a C function, which has no defaults.
            node.args = (*node.args, *ATTENTION_DEFAULTS[len(node.args) - ATTENTION_REQUIRED :])
            sinks = node.args[SINKS]
            if isinstance(sinks, fx.Node):
                with self._graph.inserting_before(node):
                    node.update_arg(SINKS, self._cast(sinks, torch.float32))

    def keep_state(self) -> None:
        """Replace portable layers over a state cache by the native ones."""
        for node in self._graph.nodes:
            if (name := _state_layer(node)) is not None:
                node.target = getattr(torch.ops.infer, f"{name}_native").default
