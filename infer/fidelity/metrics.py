"""Fidelity metrics of the optimized model against the float original, as pure functions.

Pure: tensors in, `Metric` values out. `metric_sums` holds the arithmetic, `gate` the judgement.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from ..results import Metric
from ..spec import CHOICES
from . import retrieval
from .choice_sums import ChoiceSums
from .integer_sums import IntegerSums
from .metric_sums import MetricSums, add_output, is_logits, kept_rows, next_token_targets
from .retrieval import Retrieval
from .slice_sums import Axis, SliceSums

MOST_SHAPES = 64  # of all outputs, whose slices have sums of their own
Shape = tuple[str, tuple[int, ...]]  # of one row of an output

_WHY = {
    "relative_error": "Frobenius norm of the difference over that of the float output",
    "relative_error_max": "the worst row, relative to the usual row if that is larger",
    "worst_slice_error": "of the slice with the largest error, relative to its deviation from its mean over the rows",
    "worst_row_error": "of the worst row, each slice in units of its deviation, or of the usual row's if more",
    "choice_loss": "how much lower the chosen class is in the float model, over how far its best class stands out",
    "cosine": "mean over rows",
    "cosine_min": "the worst row",
    "max_abs": "largest absolute difference",
    "top1": "share of rows whose best class is the float one",
    "kl": "mean KL(float || optimized)",
    "kl_max": "the worst row",
    "rows": "rows compared",
    "exact": "share of values that are equal",
    "worst_value": "the same of the value that is kept least",
    "changed": "values that changed although no weight reaches them",
    "out_of_range": "a value far from all of the float model's",
    "perplexity_float": "of the float original, next token",
    "perplexity": "of the optimized model, next token",
    "perplexity_change": "relative change",
    "non_finite": "values that are NaN or infinite only in the optimized model",
    "float_non_finite": "values that are NaN or infinite in the float model itself: there is no error to measure",
    "only_float_nan": "values that are NaN in the float model and numbers in the optimized model",
    **retrieval.WHY,
}
_UNITS = {"kl": "nats", "kl_max": "nats"}


def compare(
    reference: Mapping[str, Tensor],
    got: Mapping[str, Tensor],
    *,
    task: str,
    inputs: Mapping[str, Tensor] | None = None,
) -> list[Metric]:
    """Compute the metrics of one batch, output by output; see `Comparison`."""
    comparison = Comparison(task)
    comparison.add(reference, got, inputs)
    return comparison.metrics()


class Comparison:
    """Metrics over many batches in bounded memory: call `add` for each, then `metrics`.

    Float outputs: relative_error, relative_error_max, worst_slice_error, worst_row_error, cosine, cosine_min, max_abs;
    choice_loss of those that are no logits. Logits (an output of that
    name, or any float output with two or more classes when `task` is classification or text-generation):
    rows, top1, kl, kl_max. Text generation with `input_ids`: perplexity of both. Embeddings [B, D]: nearest, recall,
    rank_correlation, over the first 512 rows. Integer outputs: exact, worst_value, out_of_range, and `changed` of
    those in `integers`, which no weight reaches. Scores [B, 1] of a multiple choice model are
    logits over the choices of a question; rows of half a question at the end are not compared.
    """

    def __init__(
        self,
        task: str,
        *,
        integers: Collection[str] = (),
        units: Mapping[str, Mapping[Axis, Tensor]] | None = None,
    ) -> None:
        """`units`: those of another comparison of the same outputs over more rows, by output."""
        self._task, self._exact, self._units = task, frozenset(integers), units or {}
        self._sums: dict[str, MetricSums] = {}
        self._integers: dict[str, IntegerSums] = {}
        self._slices: dict[Shape, SliceSums] = {}
        self._choices: dict[Shape, ChoiceSums] = {}
        self._retrieval: dict[str, Retrieval] = {}
        self._broken: dict[str, str] = {}
        self._waiting: dict[str, tuple[Tensor, Tensor]] = {}

    def add(
        self,
        reference: Mapping[str, Tensor],
        got: Mapping[str, Tensor],
        inputs: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Compare one batch; of `inputs`, attention_mask [B, T] and input_ids [B, T] are used where given."""
        given = dict(inputs or {})
        for name, expected in reference.items():
            actual = got.get(name)
            if actual is None or actual.shape != expected.shape:
                have = "nothing" if actual is None else str(list(actual.shape))
                self._broken[name] = f"expected {list(expected.shape)}, got {have}"
                continue
            expected, actual = expected.detach(), actual.detach().to(expected.device)
            if self._task == "multiple-choice" and expected.shape[1:] == (1,):
                expected, actual = self._questions(name, expected, actual)
            if self._task == "question-answering":
                expected, actual = (_of_real_positions(value, given) for value in (expected, actual))
            if not expected.is_floating_point():
                known = self._integers.setdefault(name, IntegerSums(exact=name in self._exact))
                known.add(expected, actual, kept_rows(expected, given), reference)
                continue
            sums = self._sums.setdefault(name, MetricSums(is_logits(name, expected, reference, self._task)))
            self._add_slices(name, expected, actual, given, logits=sums.logits)
            generates = sums.logits and self._task == "text-generation"
            targets = next_token_targets(expected, given) if generates else None
            add_output(sums, expected, actual, given, targets)
            if self._task in ("embedding", "image-embedding", "audio-embedding") and expected.dim() == 2:
                self._retrieval.setdefault(name, Retrieval()).add(expected, actual)

    def _add_slices(
        self, name: str, expected: Tensor, actual: Tensor, given: Mapping[str, Tensor], *, logits: bool
    ) -> None:
        """Add a float output to the sums of its shape, the axis of the rows first; without one a call is a row."""
        if not expected.numel():
            return
        real, kept = None, kept_rows(expected, given)
        if kept is not None:
            real = torch.zeros(expected.shape[:2], dtype=torch.bool, device=expected.device)
            real.view(-1)[kept] = True
        axis = 0 if self._task == "multiple-choice" else _axis_of_rows(expected, given)
        by_row = [t[None] if axis is None else t.movedim(axis, 0) for t in (expected, actual)]
        expected, actual = (t[:, None] if t.dim() == 1 else t for t in by_row)
        key = (name, tuple(expected.shape[1:]))
        if key not in self._slices:
            if len(self._slices) >= MOST_SHAPES:
                return
            of_tokens = logits and self._task == "text-generation" and expected.dim() == 3
            self._slices[key] = SliceSums(expected, self._units.get(name), of_tokens=of_tokens)
            if not logits:
                self._choices[key] = ChoiceSums(expected)
        self._slices[key].add(expected, actual, real)
        if key in self._choices:
            self._choices[key].add(expected, actual, real)

    def constant_outputs(self) -> list[str]:
        """Name the float outputs that are the same for every row, of which nothing is known."""
        names = dict.fromkeys(name for name, _ in self._slices)
        return [
            name
            for name in names
            if all(sums.is_constant for (own, _), sums in self._slices.items() if own == name)
        ]

    def of_other_rows(self) -> Comparison:
        """Return an empty comparison of the same outputs, in units of at least the deviations that this one found."""
        units: dict[str, dict[Axis, Tensor]] = {}
        for (name, _), sums in self._slices.items():
            units.setdefault(name, {}).update(sums.units())
        return Comparison(self._task, integers=self._exact, units=units)

    def _questions(self, name: str, expected: Tensor, actual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scores [questions, choices] of complete questions; other rows wait for the next batch."""
        waiting = self._waiting.pop(name, (expected[:0], actual[:0]))
        pair = [torch.cat([old, new]) for old, new in zip(waiting, (expected, actual), strict=True)]
        whole = len(pair[0]) // CHOICES * CHOICES
        self._waiting[name] = pair[0][whole:], pair[1][whole:]
        return pair[0][:whole].reshape(-1, CHOICES), pair[1][:whole].reshape(-1, CHOICES)

    def metrics(self) -> list[Metric]:
        """Return one `Metric` per output and measure; an unknown value is None."""
        broken = [Metric(name, "shape", False, detail=why) for name, why in self._broken.items()]
        found = broken + [
            _metric(name, measure, value)
            for name, sums in self._sums.items()
            for measure, value in (*sums.metrics(), *self._order(name))
        ]
        for name in self._sums:
            found += self._of_slices(name)
        return found + [
            _metric(name, measure, value, place)
            for name, sums in self._integers.items()
            for measure, value, place in sums.metrics()
        ]

    def _of_slices(self, name: str) -> Iterator[Metric]:
        """Yield the worst slice, the worst row and the largest loss of a choice, over all shapes of an output."""
        each = [sums.worst() for key, sums in self._slices.items() if key[0] == name]
        for index, measure in enumerate(("worst_slice_error", "worst_row_error")):
            if each:
                worst = max((pair[index] for pair in each), key=lambda w: w.error)
                yield _metric(name, measure, worst.error, worst.place)
        chosen = [sums.worst() for key, sums in self._choices.items() if key[0] == name]
        if losses := [loss for loss in chosen if loss is not None]:
            yield _metric(name, "choice_loss", *max(losses))

    def _order(self, name: str) -> Iterator[tuple[str, float]]:
        return self._retrieval[name].metrics() if name in self._retrieval else iter(())


def _metric(name: str, measure: str, value: float | int | None, place: str = "") -> Metric:
    why = f"{place}: {_WHY[measure]}" if place else _WHY[measure]
    return Metric(name, measure, value, _UNITS.get(measure, ""), why)


def _axis_of_rows(value: Tensor, inputs: Mapping[str, Tensor]) -> int | None:
    """Return the axis of an output with one place for each row of the inputs; None where no axis is."""
    if value.dim() == 0:
        return None
    rows = next((len(t) for t in inputs.values() if t.dim()), len(value))
    if rows and len(value) % rows == 0 and len(value):
        return 0
    return next((axis for axis, size in enumerate(value.shape) if size == rows), None)


def _of_real_positions(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return logits of positions [B, T] with -inf on padding, which is never the begin or end of an answer."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != logits.shape or not logits.is_floating_point():
        return logits
    return logits.masked_fill(mask.to(logits.device) == 0, -math.inf)
