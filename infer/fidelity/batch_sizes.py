"""Comparison at sizes which kernels, guards and batch statistics treat specially: few rows, ends of a length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import msgspec
import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..errors import InferError
from ..library_errors import first_sentence
from ..results import Metric
from .metric_sums import kept_rows, rows_of
from .metrics import Comparison

SIZES = (1, 2, 3)
ROWS = 8  # compared at each size, at least
KEPT = (
    "shape",
    "non_finite",
    "float_non_finite",
    "only_float_nan",
    "exact",
    "changed",
    "out_of_range",
    "worst_slice_error",
)  # of the metrics of `Comparison`
Run = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def root_mean_squares(outputs: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the root mean square of the finite values of each float output."""
    found = {}
    for name, value in outputs.items():
        if value.is_floating_point():
            known = value.isfinite()
            finite = value if bool(known.all()) else value[known]
            size = vector_norm(finite, dtype=torch.float64)
            found[name] = float(size) / math.sqrt(finite.numel()) if finite.numel() else 0.0
    return found


def compare_size(
    where: str,
    batches: Iterable[Mapping[str, Tensor]],
    reference: Run,
    run: Run,
    task: str,
    usual: Mapping[str, float],
    slices: Comparison | None = None,
) -> list[Metric]:
    """Compare both runners over `batches` of one size, which `where` names (`batch 3`, `seq 512`).

    `usual` is each output's RMS at other sizes, `slices` an empty comparison that judges slices in their units.

    Errors are relative to that where it is larger, since a deviation from the batch's mean is all rounding in a batch
    of one. The worst output's is kept, of the rest what is not finite or has another shape, by output. Where the float
    model itself fails at this size there is nothing to compare, and one metric, `compared`, says so.
    """
    comparison = Comparison(task) if slices is None else slices
    differences: dict[str, _Difference] = {}
    for inputs in batches:
        try:
            expected = {name: value.cpu() for name, value in reference(inputs).items()}
        except (InferError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - those of torch and of ONNX Runtime share no other base
            why = f"the float model itself fails there: {first_sentence(error)}"
            return [Metric(where, "compared", None, detail=why)]
        try:
            got = {name: value.cpu() for name, value in run(inputs).items()}
        except (InferError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - a backend may raise anything
            return [Metric(where, "runs", False, detail=first_sentence(error))]
        comparison.add(expected, got, inputs)
        for name, value in expected.items():
            if value.is_floating_point() and name in got and got[name].shape == value.shape:
                differences.setdefault(name, _Difference()).add(value, got[name], inputs)
    found = []
    for metric in comparison.metrics():
        if metric.name in KEPT and (metric.name != "worst_slice_error" or slices is not None):
            found.append(msgspec.structs.replace(metric, subject=f"{metric.subject} at {where}"))
    errors = [(d.relative(usual.get(name, 0.0)), name) for name, d in differences.items()]
    if errors:
        worst, name = max(errors)
        why = f"of {name}, the worst output there, against its root mean square"
        found.append(Metric(where, "relative_error", worst, detail=why))
    return found


class _Difference:
    """Accumulated squares over batches, of real tokens and finite values."""

    def __init__(self) -> None:
        self.difference = self.reference = 0.0
        self.count = 0

    def add(self, expected: Tensor, got: Tensor, inputs: Mapping[str, Tensor]) -> None:
        kept = kept_rows(expected, inputs)
        pair = [rows_of(t, False, kept is not None).double() for t in (expected, got)]
        wanted, actual = pair if kept is None else [t[kept] for t in pair]
        finite = wanted.isfinite() & actual.isfinite()
        wanted, actual = wanted[finite], actual[finite]
        self.difference += float((actual - wanted).square().sum())
        self.reference += float(wanted.square().sum())
        self.count += int(torch.count_nonzero(finite))

    def relative(self, usual: float) -> float:
        """Relative error; zero where nothing was finite or all is zero at every size."""
        if not self.count:
            return 0.0
        scale = max(math.sqrt(self.reference / self.count), usual)
        return math.sqrt(self.difference / self.count) / scale if scale else 0.0
