"""Fidelity metrics of the optimized model against the float original, as pure functions.

Pure: tensors in, `Metric` values out. `metric_sums` holds the arithmetic, `gate` the judgement.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ..results import Metric
from ..spec import CHOICES
from . import retrieval
from .metric_sums import MetricSums, add_output, is_logits, next_token_targets
from .retrieval import Retrieval

_WHY = {
    "relative_error": "Frobenius norm of the difference over that of the float output",
    "worst_row_error": "the same for the worst row",
    "cosine": "mean over rows",
    "cosine_min": "the worst row",
    "max_abs": "largest absolute difference",
    "top1": "share of rows whose best class is the float one",
    "kl": "mean KL(float || optimized)",
    "kl_max": "the worst row",
    "rows": "rows compared",
    "exact": "share of values that are equal",
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

    Float outputs: relative_error, worst_row_error, cosine, cosine_min, max_abs. Logits (an output of that
    name, or any float output with two or more classes when `task` is classification or text-generation):
    rows, top1, kl, kl_max. Text generation with `input_ids`: perplexity of both. Embeddings [B, D]: nearest, recall,
    rank_correlation, over the first 512 rows. Integer outputs: exact. Scores [B, 1] of a multiple choice model are
    logits over the choices of a question; rows of half a question at the end are not compared.
    """

    def __init__(self, task: str) -> None:
        self._task = task
        self._sums: dict[str, MetricSums] = {}
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
            sums = self._sums.setdefault(name, MetricSums(is_logits(name, expected, reference, self._task)))
            generates = sums.logits and self._task == "text-generation"
            targets = next_token_targets(expected, given) if generates else None
            add_output(sums, expected, actual, given, targets)
            if (
                self._task in ("embedding", "image-embedding", "audio-embedding")
                and expected.dim() == 2
                and expected.is_floating_point()
            ):
                self._retrieval.setdefault(name, Retrieval()).add(expected, actual)

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
        return broken + [
            Metric(name, measure, value, _UNITS.get(measure, ""), _WHY[measure])
            for name, sums in self._sums.items()
            for measure, value in (*sums.metrics(), *self._order(name))
        ]

    def _order(self, name: str) -> Iterator[tuple[str, float]]:
        return self._retrieval[name].metrics() if name in self._retrieval else iter(())


def _of_real_positions(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return logits of positions [B, T] with -inf on padding, which is never the begin or end of an answer."""
    mask = inputs.get("attention_mask")
    if mask is None or mask.shape != logits.shape or not logits.is_floating_point():
        return logits
    return logits.masked_fill(mask.to(logits.device) == 0, -math.inf)
