"""Measured dispatch: each layer shape and format timed against float on the backend that will run it.

One layer is captured, lowered and opened as a whole model would be, so what is timed is the operator that runs later:
the packed native one where there is one. What was measured is kept in the user's cache, by processor and versions.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ... import __version__, kernels, latency, paths, plugins
from ... import device as hardware
from ...graph import capture, storage
from ...kernels import cpu
from ...plan import Plan
from ...spec import DTYPE_NAMES, TensorSpec
from .. import Candidates, Weight
from ..layer_kinds import is_linear

SLOWER = 1.03  # as the whole-model gate has it
SECONDS = 0.4  # of timing for one shape, format and number of rows


class LayerTime(msgspec.Struct, frozen=True):
    """Time in seconds of one layer in a format and in float, with the ratio's 95 % interval."""

    seconds: float
    float_seconds: float
    ratio: float
    low: float
    high: float

    @property
    def loses(self) -> bool:
        return self.low > SLOWER

    def describe(self, where: str) -> str:
        """Format as `1.60x of float at 1024 rows (3.200 against 2.000 ms)`."""
        took, against = (f"{1e3 * s:.3f}" for s in (self.seconds, self.float_seconds))
        return f"{self.ratio:.2f}x of float {where} ({took} against {against} ms)"

    @classmethod
    def total(cls, parts: Sequence[tuple[int, LayerTime]]) -> LayerTime:
        """Sum over (calls, one call); each ratio is weighted by its share of the float time."""
        seconds = sum(calls * t.seconds for calls, t in parts)
        float_seconds = sum(calls * t.float_seconds for calls, t in parts)
        if not float_seconds:
            return cls(seconds, 0.0, 1.0, 1.0, 1.0)
        ratio, low, high = (
            sum(calls * t.float_seconds * getattr(t, name) for calls, t in parts) / float_seconds
            for name in ("ratio", "low", "high")
        )
        return cls(seconds, float_seconds, ratio, low, high)


TimeFunction = Callable[[nn.Module, nn.Module, Tensor], LayerTime]


class LayerTimer:
    """Cached times by (shape, format, input) for this processor, backend and versions."""

    def __init__(self, plan: Plan, time: TimeFunction | None = None, folder: Path | None = None) -> None:
        self.plan = plan
        self.backend = _backend(plan)
        self.measure = time or self._paired
        self.path = (folder or paths.cache("dispatch")) / f"{self._key()}.json"
        self._known: dict[str, LayerTime] = {}
        if self.path.is_file():
            try:
                self._known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, LayerTime])
            except msgspec.DecodeError:
                self.path.unlink()  # half written by a process that died
        self.used: set[str] = set()
        self.num_measured = 0

    def summary(self) -> str:
        return f"{self.num_measured} timed now, {len(self.used) - self.num_measured} known from before"

    def _key(self) -> str:
        marks = {
            "infer": __version__,
            "torch": str(torch.__version__),
            "backend": self.backend,
            "threads": str(torch.get_num_threads()),
            "operators": _operators(),
            **hardware.fingerprint(self.plan.device),
        }
        return hashlib.sha256(msgspec.json.encode(marks, order="sorted")).hexdigest()[:24]

    def timed(self, candidates: Candidates, weight: Weight, format: str, x: tuple[int, ...]) -> LayerTime:
        """Return the time of one format of one Linear on one input shape, cached or measured now."""
        layer = next(site.layer for site in weight.sites if is_linear(site.layer))
        stored = "" if isinstance(layer, nn.Linear) else f" {type(layer).__name__}"
        key = f"{format} {list(weight.tensor.shape)}{stored} on {list(x)}"
        self.used.add(key)
        if key not in self._known:
            with candidates.single(weight, layer, format) as small:
                self._known[key] = self.measure(small, layer, torch.randn(x))
            self.num_measured += 1
        return self._known[key]

    def save(self) -> None:
        """Write the cache file atomically (rename), since another process may read it."""
        if self.num_measured:
            beside = self.path.with_suffix(f".{id(self):x}.tmp")
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(self._known), indent=1))
            beside.replace(self.path)

    def _paired(self, small: nn.Module, layer: nn.Module, x: Tensor) -> LayerTime:
        with tempfile.TemporaryDirectory() as work:
            ours, theirs = (
                self._runner(module, x, Path(work) / name)
                for module, name in ((small, "small"), (layer, "float"))
            )
            given = {"x": x}
            pair = latency.paired(
                lambda: ours.run(given),
                lambda: theirs.run(given),
                device=self.plan.device,
                max_seconds=SECONDS,
            )
            ours.close()
            theirs.close()
        return LayerTime(pair.a.p50, pair.b.p50, pair.ratio, pair.low, pair.high)

    def _runner(self, layer: nn.Module, x: Tensor, folder: Path) -> Any:
        """Lower and open the layer alone, as the backend would run it within a model."""
        folder.mkdir()
        specs = (TensorSpec("x", DTYPE_NAMES[x.dtype], tuple(x.shape)),)
        graph = capture.capture(_SingleLayer(layer).eval(), specs, {"x": x})
        storage.save(graph, folder)
        backend = plugins.get("backends", self.backend)
        backend.lower(graph, self.plan.with_(backend=self.backend), folder)
        return backend.open(folder, self.plan.device)


class _SingleLayer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def _backend(plan: Plan) -> str:
    """Choose the backend that times layers: that of the plan, eager for compiled code.

    Compiled code calls the same operators as plain torch, which needs no compiling; where the native kernels
    are missing and any backend may run, that is ONNX Runtime.
    """
    if plan.backend not in ("auto", "inductor"):
        return plan.backend
    native_missing = plan.device == "cpu" and cpu.why_not() is not None
    if plan.backend == "auto" and native_missing and plugins.why_not("backends", "ort") is None:
        return "ort"
    return "eager"


def _operators() -> str:
    """Return a hash of the operators' sources, so that a kernel upgrade invalidates cached times."""
    digest = hashlib.sha256()
    root = Path(kernels.__file__).resolve().parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
