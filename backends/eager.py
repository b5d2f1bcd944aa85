"""Eager backend: runs the graph in plain torch, one operator after the other; the reference for all others.

To add a backend copy this file, rename it, and make `lower` write what `open` reads; nothing else has to change.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from infer.graph import storage
from infer.graph.program import Graph, TorchGraph, plain_call
from infer.kernels import gpu
from infer.kernels.passes import fragment_fusion, prepack
from infer.kernels.passes.fused_program.padding import attention_length
from infer.kernels.passes.rotary.fusion import fuse_rotary
from infer.plan import Plan
from infer.results import Lowered
from infer.spec import Finding

EXECUTES_CODE = True
PORTABLE = False
STEPS = True


def missing() -> str | None:
    return None


def refuses(graph: Graph, plan: Plan) -> str | None:
    return graph.no_program or None


def target(device: str) -> dict[str, str]:
    return {}


def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
    operators = Finding("lower", "operators", len(graph.exported.graph.nodes), why="run one by one by torch")
    return Lowered([operators, *(prepack.findings(graph.exported) if plan.device == "cpu" else ())])


class Runner:
    def __init__(self, graph: TorchGraph, device: str) -> None:
        self.inputs, self.outputs, self._device = graph.inputs, graph.outputs, device
        self.attention_length = attention_length(graph.program)
        self._call = plain_call(graph.program, graph.inputs)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with torch.no_grad():
            outputs = self._call({name: value.to(self._device) for name, value in inputs.items()})
        return dict(zip((o.name for o in self.outputs), outputs, strict=True))

    def close(self) -> None:
        del self._call


def open(folder: Path, device: str) -> Runner:
    graph = storage.load(folder, device)
    if device == "cpu" and prepack.usable(graph.program):
        graph = replace(graph, program=prepack.packed(graph.program))
    elif gpu.packs(device):
        graph = replace(graph, program=fuse_rotary(fragment_fusion.packed(graph.program))[0])
    return Runner(graph, device)
