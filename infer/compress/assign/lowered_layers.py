"""Single layers lowered and opened as the backend would run them within a model; the last few stay open.

Float layers are needed by every format: trials of one process share them (`SharedFloatLayers`).
"""

from __future__ import annotations

import shutil
import tempfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ... import plugins
from ...graph import capture, storage
from ...plan import Plan
from ...spec import DTYPE_NAMES, TensorSpec

KEPT = 4  # each holds its weights
MAX_ROWS = 1 << 20


class LoweredLayers:
    """Runners of single layers for `backend`, by name; the least recently used are closed.

    Plain torch and the runtimes of graphs (`PORTABLE`) run any number of rows, as they do in a model of any batch size,
    so that a layer is made once for all; the other backends compile for the number they are given. More than `KEPT`
    stay open while their weights take no more than `room` bytes. Files are below `folder`, by default that of temporary
    files.
    """

    def __init__(self, plan: Plan, backend: str, room: int = 0, folder: Path | None = None) -> None:
        self.plan = plan.with_(backend_options={})
        self.backend = backend
        self._any_rows = backend == "eager" or plugins.get("backends", backend).PORTABLE
        self._room, self._folder = room, folder
        self._sizes: dict[tuple[str, tuple[int, ...]], int] = {}  # bytes
        self._open: OrderedDict[tuple[str, tuple[int, ...]], tuple[Any, Path]] = OrderedDict()

    def runner(self, name: str, layer: nn.Module, x: Tensor) -> Any:
        """Return the open runner of a layer for inputs like `x`; `name` stands for its type, shape and format."""
        key = name, tuple(x.shape[1:] if self._any_rows else x.shape)
        if key not in self._open:
            size = sum(value.nbytes for value in layer.state_dict().values())
            while len(self._open) >= KEPT and sum(self._sizes.values()) + size > self._room:
                self._close(next(iter(self._open)))
            folder = Path(tempfile.mkdtemp(prefix="layer-", dir=self._folder))
            try:
                self._open[key], self._sizes[key] = (self._lower(layer, x, folder), folder), size
            except BaseException:
                shutil.rmtree(folder)
                raise
        self._open.move_to_end(key)
        return self._open[key][0]

    def close(self) -> None:
        for key in list(self._open):
            self._close(key)

    def _close(self, key: tuple[str, tuple[int, ...]]) -> None:
        runner, work = self._open.pop(key)
        del self._sizes[key]
        runner.close()
        shutil.rmtree(work)

    def _lower(self, layer: nn.Module, x: Tensor, folder: Path) -> Any:
        shape = ("batch", *x.shape[1:]) if self._any_rows else tuple(x.shape)
        specs = (TensorSpec("x", DTYPE_NAMES[x.dtype], shape),)
        sizes = {"batch": (1, MAX_ROWS)} if self._any_rows else {}
        graph = capture.capture(_SingleLayer(layer).eval(), specs, {"x": x}, sizes=sizes)
        storage.save(graph, folder)
        backend = plugins.get("backends", self.backend)
        backend.lower(graph, self.plan.with_(backend=self.backend), folder)
        return backend.open(folder, self.plan.device)


class SharedFloatLayers:
    """Open float layers for trials of any format, by backend and dtype; options as of `LoweredLayers`, for each."""

    def __init__(self, room: int = 0, folder: Path | None = None) -> None:
        self._room, self._folder = room, folder
        self._made: dict[tuple[str, str, str], LoweredLayers] = {}
        self._seconds: dict[tuple[str, str, str], dict[str, float]] = {}

    def seconds_of(self, plan: Plan, backend: str) -> dict[str, float]:
        """Return the first known seconds of the float layers of a backend, to be filled: by layer and input shape.

        Ratios to one time make the layers of several formats comparable, however busy the machine was at each.
        """
        return self._seconds.setdefault((backend, plan.dtype, plan.device), {})

    def of(self, plan: Plan, backend: str) -> LoweredLayers:
        """Return the float layers of a backend in the dtype and on the device of a plan."""
        key = backend, plan.dtype, plan.device
        if key not in self._made:
            own = plan.with_(quant="none", layers={})
            self._made[key] = LoweredLayers(own, backend, self._room, self._folder)
        return self._made[key]

    def close(self) -> None:
        for layers in self._made.values():
            layers.close()


class _SingleLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)
