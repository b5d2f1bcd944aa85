"""The original with its float32 constants rounded elsewhere: what that changes in its answers, no engine decides."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotUsableError
from ..graph.program import Graph, OpenvinoGraph
from .original_runners import UserFileRunner, UserModuleRunner

WAYS = 2  # in which the constants are rounded


def rounded(original: Graph, module: nn.Module | None, work: Path) -> list[RoundedFile] | list[RoundedModule]:
    """Return the user's ONNX file or module with its constants rounded elsewhere; none of any other original."""
    if isinstance(original, OpenvinoGraph):
        return []
    if original.file is not None:
        return [RoundedFile(original, work, seed) for seed in range(WAYS)]
    if module is not None:
        return [RoundedModule(module, original, seed) for seed in range(WAYS)]
    return []


class RoundedModule(UserModuleRunner):
    """The user's own module with copies in place of its float32 constants while it runs, a late bit of each flipped."""

    def __init__(self, module: nn.Module, graph: Graph, seed: int) -> None:
        super().__init__(module, graph)
        self._bit = 4 << seed  # of seed 0 2^-22 to 2^-21 of a value

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Run one batch; what the constants were stored in, which may be mapped to be read alone, is not written to."""
        tensors = (*self._module.parameters(), *self._module.buffers())
        own = [(t, t.data) for t in tensors if t.dtype == torch.float32 and not t.is_inference()]
        try:
            for tensor, value in own:
                tensor.data = self._flipped(value)
            return super().run(inputs)
        finally:
            for tensor, value in own:
                tensor.data = value

    def _flipped(self, value: Tensor) -> Tensor:
        """Flip the bit of numbers: of zero, and of what is not finite, it would make another kind of number."""
        normal = (value.abs() >= torch.finfo(value.dtype).tiny) & value.isfinite()
        return torch.bitwise_xor(value.view(torch.int32), normal.int() * self._bit).view(value.dtype)


class RoundedFile:
    """The user's ONNX file as written, its constants rounded elsewhere; written and opened at the first call."""

    def __init__(self, original: Graph, work: Path, seed: int) -> None:
        self._original, self._path, self._seed = original, work / f"rounded-{seed}" / "model.onnx", seed
        self._runner: Any = None
        self._runs = True

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        """Run one batch; None where sizes of the model follow from constants, so that it does not run with others."""
        from ..onnx.ort_session import runtime_errors

        failures: tuple[type[BaseException], ...] = (NotUsableError, *runtime_errors())
        try:
            if self._runs and self._runner is None:
                self._runner = self._open()
            return None if self._runner is None else self._runner.run(inputs)
        except failures:
            self._runs = self._runner is not None
            return None

    def _open(self) -> UserFileRunner:
        from ..onnx.ort_session import EXACT, OrtRunner
        from ..onnx.source.rounded_constants import write_rounded

        graph = self._original
        if graph.file is None:
            raise ValueError("expected the graph of an ONNX source")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_rounded(graph.file, self._path, self._seed)
        return UserFileRunner(
            OrtRunner(self._path, graph.inputs, graph.outputs, "cpu", settings=EXACT), graph
        )

    def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None
