"""Single layers lowered and opened as the backend would run them within a model; the last few stay open."""

from __future__ import annotations

import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ... import plugins
from ...graph import capture, storage
from ...plan import Plan
from ...spec import DTYPE_NAMES, TensorSpec

KEPT = 4  # a float layer and its formats; each holds its weights
MAX_ROWS = 1 << 20


class LoweredLayers:
    """Runners of single layers for `backend`, by name; those not asked for lately are closed.

    Eager runs a program of any number of rows, so that it is made once for all; the other backends compile for the
    number they are given.
    """

    def __init__(self, plan: Plan, backend: str) -> None:
        self.plan = plan.with_(backend_options={})
        self.backend = backend
        self._any_rows = backend == "eager"
        self._open: OrderedDict[tuple[str, tuple[int, ...]], tuple[Any, tempfile.TemporaryDirectory[str]]] = (
            OrderedDict()
        )

    def runner(self, name: str, layer: nn.Module, x: Tensor) -> Any:
        """Return the open runner of a layer for inputs like `x`; `name` stands for its type, shape and format."""
        key = name, tuple(x.shape[1:] if self._any_rows else x.shape)
        if key not in self._open:
            while len(self._open) >= KEPT:
                self._close(next(iter(self._open)))
            self._open[key] = self._lower(layer, x)
        self._open.move_to_end(key)
        return self._open[key][0]

    def close(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: tuple[str, tuple[int, ...]]) -> None:
        runner, work = self._open.pop(key)
        runner.close()
        work.cleanup()

    def _lower(self, layer: nn.Module, x: Tensor) -> tuple[Any, tempfile.TemporaryDirectory[str]]:
        work = tempfile.TemporaryDirectory()
        folder = Path(work.name)
        shape = ("batch", *x.shape[1:]) if self._any_rows else tuple(x.shape)
        specs = (TensorSpec("x", DTYPE_NAMES[x.dtype], shape),)
        sizes = {"batch": (1, MAX_ROWS)} if self._any_rows else {}
        graph = capture.capture(_SingleLayer(layer).eval(), specs, {"x": x}, sizes=sizes)
        storage.save(graph, folder)
        backend = plugins.get("backends", self.backend)
        backend.lower(graph, self.plan.with_(backend=self.backend), folder)
        return backend.open(folder, self.plan.device), work


class _SingleLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
