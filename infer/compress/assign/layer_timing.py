"""Measured dispatch: each layer shape and format timed against float on the backend that will run it.

One layer is captured, lowered and opened as a whole model would be, so what is timed is the operator that runs later:
the packed native one where there is one. What was measured is kept in the user's cache, by processor and versions,
unless other processes had the processors meanwhile: then one thread, which waits for no other, is timed for this run.
Runtimes with threads of their own keep them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ... import __version__, kernels, latency, paths, plugins
from ... import device as hardware
from ...device.processors import MOST_MISSING, OtherLoad, one_thread
from ...kernels import cpu
from ...plan import Plan
from ...results import LayerForm
from .. import Candidates, Weight
from ..layer_kinds import is_linear
from .lowered_layers import LoweredLayers, SharedFloatLayers

SLOWER = 1.03  # as the whole-model gate has it
SECONDS, PAIRS = 0.4, 100  # of timing for one shape, format and number of rows, at most
MEASURED_AS = "2"  # part of the cache's key: times of another number were taken in another way


class LayerTime(msgspec.Struct, frozen=True):
    """Time in seconds of one layer in a format and in float, with the ratio's 95 % interval."""

    seconds: float
    float_seconds: float
    ratio: float
    low: float
    high: float

    @classmethod
    def of(cls, pair: latency.Paired) -> LayerTime:
        """Return the time of a pair: its medians, or its shortest calls where the medians are not the layer's own.

        A team of threads waits for the one whose processor another process uses: ten milliseconds in each call.
        """
        if not pair.a.disturbed and not pair.b.disturbed:
            return cls(pair.a.p50, pair.b.p50, pair.ratio, pair.low, pair.high)
        ratio = pair.a.min / max(pair.b.min, 1e-9)
        return cls(pair.a.min, pair.b.min, ratio, ratio, ratio)

    def against(self, float_seconds: float) -> LayerTime:
        """Return the same ratio to a layer in float that takes so many seconds."""
        return LayerTime(self.ratio * float_seconds, float_seconds, self.ratio, self.low, self.high)

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
    """Cached times by (shape, form, input) for this processor, backend and versions.

    The form is that of the backend where it names one (`layer_form`), else the format.
    """

    def __init__(
        self,
        plan: Plan,
        time: TimeFunction | None = None,
        folder: Path | None = None,
        floats: SharedFloatLayers | None = None,
    ) -> None:
        self.plan = plan
        self.backend = _backend(plan)
        self._time = time
        self._lowered = LoweredLayers(plan, self.backend)
        self._shared = floats is not None
        self._floats = (floats or SharedFloatLayers()).of(plan, self.backend)
        self._seconds = None if floats is None else floats.seconds_of(plan, self.backend)
        self.path = (folder or paths.cache("dispatch")) / f"{self._key()}.json"
        self._known: dict[str, LayerTime] = {}
        if self.path.is_file():
            try:
                self._known = msgspec.json.decode(self.path.read_bytes(), type=dict[str, LayerTime])
            except msgspec.DecodeError:
                self.path.unlink()  # half written by a process that died
        self.used: set[str] = set()
        self._held_up: set[str] = set()  # measured while other processes had the processor
        self._missing = 0.0  # processors that others took from the last timing
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
            "measured": MEASURED_AS,
            **hardware.fingerprint(self.plan.device),
        }
        return hashlib.sha256(msgspec.json.encode(marks, order="sorted")).hexdigest()[:24]

    def timed(self, candidates: Candidates, weight: Weight, format: str, x: tuple[int, ...]) -> LayerTime:
        """Return the time of one format of one Linear on one input shape, cached or measured now."""
        form = self.form(candidates, weight, format)
        layer = f"{_layer_name(weight)} on {list(x)}"
        key = f"{format if form is None else form.name} {layer}"
        self.used.add(key)
        if key not in self._known:
            self._known[key] = self.measured(candidates, weight, format, x)
            if self._missing > MOST_MISSING:
                self._held_up.add(key)
            self.num_measured += 1
        found = self._known[key]
        if self._seconds is None:
            return found
        return found.against(self._seconds.setdefault(layer, found.float_seconds))

    def form(self, candidates: Candidates, weight: Weight, format: str) -> LayerForm | None:
        """Return the form in which the backend runs a weight in a format; None where it has one for each format."""
        layer_form = getattr(plugins.get("backends", self.backend), "layer_form", None)
        if layer_form is None or self._time is not None:
            return None
        found: LayerForm | None = layer_form(candidates.packing(weight, format).tensors)
        return found

    def measured(self, candidates: Candidates, weight: Weight, format: str, x: tuple[int, ...]) -> LayerTime:
        """Measure the time of one format of one Linear on random inputs of shape `x`."""
        layer = _linear(weight)
        with candidates.single(weight, layer, format) as small:
            if self._time is not None:
                return self._time(small, layer, torch.randn(x))
            return self._paired(small, layer, torch.randn(x), _layer_name(weight), format)

    def save(self) -> None:
        """Write the cache file atomically (rename), since another process may read it."""
        if self.num_measured:
            beside = self.path.with_suffix(f".{id(self):x}.tmp")
            kept = {key: found for key, found in self._known.items() if key not in self._held_up}
            beside.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1))
            beside.replace(self.path)

    def close(self) -> None:
        """Close the layers that are still open, shared ones excepted; times already taken stay."""
        self._lowered.close()
        if not self._shared:
            self._floats.close()

    def _paired(self, small: nn.Module, layer: nn.Module, x: Tensor, name: str, format: str) -> LayerTime:
        runners = self._lowered.runner(f"{format} {name}", small, x), self._floats.runner(name, layer, x)
        ours, theirs = (lambda runner=runner: runner.run({"x": x}) for runner in runners)

        def pair() -> latency.Paired:
            return latency.paired(ours, theirs, device=self.plan.device, max_seconds=SECONDS, max_pairs=PAIRS)

        if self.plan.device != "cpu":
            return LayerTime.of(pair())
        load, timed = OtherLoad(), pair()
        self._missing = load.excess(torch.get_num_threads())
        if self._missing > MOST_MISSING and torch.get_num_threads() > 1:
            with one_thread():
                timed = pair()
        return LayerTime.of(timed)


def _linear(weight: Weight) -> nn.Module:
    return next(site.layer for site in weight.sites if is_linear(site.layer))


def _layer_name(weight: Weight) -> str:
    """Return the sizes of a weight's Linear, with its type where that is another: `[64, 32] Conv1D`."""
    layer = _linear(weight)
    stored = "" if isinstance(layer, nn.Linear) else f" {type(layer).__name__}"
    return f"{list(weight.tensor.shape)}{stored}"


def _backend(plan: Plan) -> str:
    """Choose the backend that times layers: that of the plan, or the one whose operators it calls (`LAYERS_AS`).

    For "auto" it is eager, and ONNX Runtime where the native kernels are missing.
    """
    if plan.backend != "auto":
        own: str = getattr(plugins.get("backends", plan.backend), "LAYERS_AS", plan.backend)
        return own
    native_missing = plan.device == "cpu" and cpu.why_not() is not None
    return "ort" if native_missing and plugins.why_not("backends", "ort") is None else "eager"


def _operators() -> str:
    """Return a hash of the operators' sources, so that a kernel upgrade invalidates cached times."""
    digest = hashlib.sha256()
    root = Path(kernels.__file__).resolve().parent
    for path in sorted(p for p in root.rglob("*") if p.suffix in (".py", ".cpp", ".h")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
