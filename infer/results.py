"""Typed results of the stages: what code decides on. A `Finding` is only the line that a person reads."""

from __future__ import annotations

from typing import Literal

import msgspec

from .coverage import Coverage
from .spec import Finding


class Metric(msgspec.Struct, frozen=True):
    """One measure of fidelity.

    `subject` is an output (`logits`), an output or all of them at another batch size (`logits at batch 3`, `batch 1`),
    or a schedule of a language model's steps (`decode`). `name` is a metric of `infer.fidelity`: `top1`, `kl`, … A
    value that can't be known is None. `unit` and `detail` are for display.
    """

    subject: str
    name: str
    value: float | int | bool | None
    unit: str = ""
    detail: str = ""

    @property
    def label(self) -> str:
        """Name of the metric for display: `logits.top1`."""
        return f"{self.subject}.{self.name}"

    @property
    def number(self) -> float | int | None:
        """The value of a numeric result; None for flags and unknown values."""
        return None if isinstance(self.value, bool) else self.value

    def finding(self) -> Finding:
        return Finding("compare", self.label, self.value, self.unit, self.detail)


class LayerError(msgspec.Struct, frozen=True):
    """Relative error of one layer's output, all errors of earlier layers included; None where it can't be known."""

    name: str
    kind: str  # the class of the float layer
    error: float | None


class LayerResult(msgspec.Struct, frozen=True):
    """One layer that was quantized. `bits` per weight, tables and scales included; `weight_error` is relative rms."""

    name: str
    format: str
    bits: float
    weight_error: float
    tied_to: str = ""  # the layer whose weight it shares

    def finding(self) -> Finding:
        tied = f", tied to {self.tied_to}" if self.tied_to else ""
        why = f"{self.format}, {self.bits:.3f} bits per weight{tied}"
        return Finding("layer", self.name, self.weight_error, "relative rms", why)


class BackendResult(msgspec.Struct, frozen=True):
    """One backend. `seconds` is the sum of its median latencies over the batch sizes; None when it was not timed.

    One that is skipped can run the model and could not have won.

    `name` ends in the compute dtype, which is `dtype`, where it is another one than that of the plan.
    """

    name: str
    outcome: Literal["chosen", "tried", "skipped", "refused"]
    seconds: float | None
    why: str = ""
    dtype: str = ""

    def finding(self) -> Finding:
        return Finding("backend", f"{self.outcome} {self.name}", self.seconds, "s", self.why)


class ScoresOnly(msgspec.Struct, frozen=True):
    """Reason that a language model scores text and generates none. `by_model`: no other backend would change it."""

    reason: str
    by_model: bool


IN_FLOAT = (
    "layers in float"  # finding of a backend: packed layers that compute with weights decoded at opening
)


class Lowered(msgspec.Struct, frozen=True):
    """Result of lowering a graph.

    `coverage`: of a backend that quantized an ONNX source itself, which of its weights. `more_exact`: options of the
    backend, with their values, with which the quantized layers of this graph would lose less, what costs least first.
    """

    findings: list[Finding]
    coverage: Coverage | None = None
    more_exact: tuple[tuple[str, str], ...] = ()


class LayerForm(msgspec.Struct, frozen=True):
    """Way in which a backend runs a packed layer; layers of one form and size take the same time, whatever format.

    `decoded_if_slower`: lowering takes the decoded weight instead where that is faster, except in steps of language
    models, so that no such layer is slower than float.
    """

    name: str
    decoded_if_slower: bool = False
