"""Accumulation of fidelity metrics over batches, for one output.

A *row* is what one decision is made on: the last axis of logits and of per-token outputs, otherwise one
sample. Padded positions (attention_mask = 0) are no rows. MetricSums are float64, in chunks: logits are never held
twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.linalg import vector_norm

from ..spec import DECODER_IDS
from .thresholds import TOP1_TASKS

CHUNK = 1 << 20  # values widened to float32 at a time: 4 MiB, a dozen of them alive
EPSILON = torch.finfo(torch.float32).eps
NOTHING = EPSILON**2  # of the largest row: what lies below has no direction
# Of a share (0 to 1), by value: sigmoids round to units in the last place of 1, so that a row of 1e-6 has no direction.
SHARE_ROUNDING = 128 * EPSILON
MASKED = -1e4  # what float16 code writes for -inf
SOUND = {"input_values", "input_features"}  # inputs of which an output may have fewer rows than the mask


@dataclass
class MetricSums:
    """Accumulated sums of one output."""

    logits: bool
    probabilities: bool | None = None
    non_finite: int = 0
    float_non_finite: int = 0
    only_float_nan: int = 0
    difference: float = 0.0
    norm: float = 0.0
    max_abs: float = 0.0
    rows: int = 0
    low: float = math.inf  # of the reference
    high: float = -math.inf
    errors: list[Tensor] = field(
        default_factory=list
    )  # Frobenius norms [2, rows], of differences and the reference
    cosines: list[Tensor] = field(default_factory=list)  # of each row
    means: list[Tensor] = field(
        default_factory=list
    )  # quadratic [2, rows], of the reference and of the other side
    largest: list[Tensor] = field(default_factory=list)  # magnitude of each row on either side
    top1: int = 0
    kl: float = 0.0
    kl_rows: int = 0
    kl_max: float = 0.0
    targets: int = 0
    nll: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def metrics(self) -> Iterator[tuple[str, float | int | None]]:
        if not self.rows:  # an empty output, or padding alone: nothing to compare, nothing wrong
            yield "rows", 0
            return
        yield "relative_error", _ratio(self.difference, self.norm)
        yield "relative_error_max", self._worst_error()
        cosines = self._audible_cosines()
        yield "cosine", float(cosines.mean())
        yield "cosine_min", float(cosines.min())
        yield "max_abs", self.max_abs
        if self.logits:
            yield "rows", self.rows
            yield "top1", _share(self.top1, self.rows)
            yield "kl", _share(self.kl, self.kl_rows)
            yield "kl_max", self.kl_max if self.kl_rows else None
        if self.targets:
            reference, got = (_exp(nll / self.targets) for nll in self.nll)
            yield "perplexity_float", reference
            yield "perplexity", got
            yield "perplexity_change", got / reference - 1 if got is not None and reference else None
        for what in ("non_finite", "float_non_finite", "only_float_nan"):
            if count := getattr(self, what):
                yield what, count

    def _worst_error(self) -> float | None:
        """Return the relative error of the worst row; of one smaller than the usual row beside the usual one."""
        errors, norms = torch.cat(self.errors, 1)
        relative = errors / norms.clamp(min=float(norms.median()))
        known = relative[~relative.isnan()]  # 0 / 0 of rows of zeros
        return float(known.max()) if len(known) and bool(known.isfinite().all()) else None

    def _audible_cosines(self) -> Tensor:
        """Return the cosine of each row; 1 where both are nothing beside the largest row, as 1e-30 and 0 beside 1: the
        direction of what lies two float32 significands below says nothing. Of shares the rounding of 1 is added to
        each value of both sides, in a dimension of its own.
        """
        cosines, largest = torch.cat(self.cosines), torch.cat(self.largest)
        if self.low >= 0.0 and self.high <= 1.0:
            floor = SHARE_ROUNDING**2
            reference, got = torch.cat(self.means, dim=1)
            sizes = ((reference**2 + floor) * (got**2 + floor)).sqrt()
            cosines = ((cosines * reference * got + floor) / sizes).clamp(-1, 1)
        return cosines.where(largest > NOTHING * largest.max(), 1.0)


def _share(part: float, whole: int) -> float | None:
    return part / whole if whole else None


def _ratio(difference: float, norm: float) -> float | None:
    """Return the root of a quotient of squared norms; against zeros only an exact match has no error."""
    if norm > 0:
        return math.sqrt(difference / norm)
    return 0.0 if difference == 0 else None


def _exp(mean_nll: float) -> float | None:
    return math.exp(mean_nll) if mean_nll < 700 else None


def class_axis(value: Tensor) -> int:
    """Return the class axis: 1 for images ([B, C, H, W]), else the last."""
    return 1 if value.dim() == 4 else -1


def is_logits(name: str, value: Tensor, outputs: Mapping[str, Tensor], task: str) -> bool:
    """Return true for the output "logits", or a float output with classes of a classifier or language model."""
    if not value.is_floating_point() or value.dim() < 2 or value.shape[class_axis(value)] < 2:
        return False
    return name == "logits" if "logits" in outputs else task in ("text-generation", *TOP1_TASKS)


def rows_of(value: Tensor, logits: bool, per_token: bool) -> Tensor:
    """Reshape to [rows, width], a view where the layout permits it."""
    if value.dim() == 0:
        return value.reshape(1, 1)
    if logits:
        value = value.movedim(class_axis(value), -1)
        return value.reshape(-1, value.shape[-1])
    if per_token:
        return value.reshape(value.shape[0] * value.shape[1], -1)
    return value.reshape(value.shape[0], -1) if value.numel() else value.reshape(0, 1)


def kept_rows(value: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return indices of real tokens' or frames' rows, or None when the output has no padded positions.

    An output of sound with fewer rows than the mask has samples has a row for each frame: a frame is real if the
    sample is at which it begins, frames being of equal length.
    """
    mask = inputs.get("attention_mask")
    per_token = value.dim() >= 3 or not value.is_floating_point()
    if mask is None or mask.dim() != 2 or not per_token or value.shape[:1] != mask.shape[:1]:
        return None
    mask = mask.to(value.device)
    if value.shape[1] != mask.shape[1]:
        if not (SOUND & inputs.keys()) or not 0 < value.shape[1] < mask.shape[1]:
            return None
        begins = torch.arange(value.shape[1], device=value.device) * mask.shape[1] // value.shape[1]
        mask = mask[:, begins]
    return mask.reshape(-1).nonzero().reshape(-1)


def add_output(
    sums: MetricSums, reference: Tensor, got: Tensor, inputs: Mapping[str, Tensor], targets: Tensor | None
) -> None:
    """Add one batch of one float output. `targets` [rows] are the classes that came next, -1 where unknown."""
    kept = kept_rows(reference, inputs)
    expected, actual = (rows_of(t, sums.logits, kept is not None) for t in (reference, got))
    if sums.logits and sums.probabilities is None and expected.numel():
        sums.probabilities = _are_probabilities(expected if kept is None else expected[kept[:64]])
    count = len(expected) if kept is None else len(kept)
    step = max(1, CHUNK // max(1, expected.shape[1]))
    for start in range(0, count, step):
        take: Any = slice(start, min(start + step, count))
        take = take if kept is None else kept[take]
        pair = _widen(expected[take]), _widen(actual[take])
        if sums.logits:
            _add_logits(sums, *pair, None if targets is None else targets[take])
        _add_rows(sums, *pair)


def _widen(rows: Tensor) -> Tensor:
    return rows if rows.dtype == torch.float64 else rows.float()


def _are_probabilities(rows: Tensor) -> bool:
    few = rows[:64].double()
    return bool((few >= 0).all() and ((few.sum(-1) - 1).abs() < 1e-3).all())


def _add_rows(sums: MetricSums, reference: Tensor, got: Tensor) -> None:
    """Add pairs [rows, width]; entries with a non-finite reference have no error."""
    finite, sound = reference.isfinite(), got.isfinite()
    if not bool((finite & sound).all()):
        still_masked = (reference < 0) & (got < MASKED)
        lost = (finite & ~sound) | (reference.isinf() & (reference != got) & ~still_masked)
        sums.non_finite += int(lost.sum())
        hidden = reference.isneginf() if sums.logits else torch.zeros_like(finite)
        sums.float_non_finite += int((~finite & ~hidden).sum())
        sums.only_float_nan += int((reference.isnan() & ~got.isnan()).sum())
        reference, got = reference.where(finite & sound, 0.0), got.where(finite & sound, 0.0)
    difference = got - reference
    error, norm, other = (vector_norm(t, dim=1, dtype=torch.float64) for t in (difference, reference, got))
    sums.errors.append(torch.stack((error, norm)))
    sums.difference += float(error.square().sum())
    sums.norm += float(norm.square().sum())
    sums.low, sums.high = min(sums.low, float(reference.min())), max(sums.high, float(reference.max()))
    sums.means.append(torch.stack((norm, other)) / math.sqrt(reference.shape[1]))
    cosine = _cosine(reference, got)
    sums.rows += len(reference)
    sums.max_abs = max(sums.max_abs, float(difference.abs().max()))
    sums.cosines.append(cosine)
    sums.largest.append(torch.maximum(reference.abs().amax(1), got.abs().amax(1)).double())


def _cosine(reference: Tensor, got: Tensor) -> Tensor:
    """Return the cosine of each row, of any magnitude: 1 of two rows of zeros, 0 where one is zero."""
    sizes = [t.abs().amax(1, keepdim=True) for t in (reference, got)]
    zero = [(size == 0).squeeze(1) for size in sizes]
    # Divided first: products of 1e-24 and of 1e20 are out of the range of float32.
    x, y = (t.double() / s.where(s > 0, 1.0).double() for t, s in zip((reference, got), sizes, strict=True))
    dot = (x * y).sum(1) / (x.norm(dim=1) * y.norm(dim=1)).clamp(min=1e-300)
    return dot.clamp(-1, 1).where(~(zero[0] | zero[1]), (zero[0] & zero[1]).double())


def _add_logits(sums: MetricSums, reference: Tensor, got: Tensor, targets: Tensor | None) -> None:
    """Add agreement of the best class; a tie with the float model's best counts as agreement."""
    best = reference.amax(-1, keepdim=True)
    sums.top1 += int((reference.gather(-1, got.argmax(-1, keepdim=True)) >= best).sum())
    p, q = (_log_probabilities(t, bool(sums.probabilities)) for t in (reference, got))
    if targets is not None:
        _add_targets(sums, p, q, targets)
    terms = p.exp().mul_(p - q)
    if not bool(terms.isfinite().all()):
        terms = terms.where(p > -math.inf, 0.0)
    kl = terms.sum(-1, dtype=torch.float64)
    kl = kl[kl.isfinite()].clamp(min=0)
    sums.kl, sums.kl_rows = sums.kl + float(kl.sum()), sums.kl_rows + len(kl)
    sums.kl_max = max(sums.kl_max, float(kl.max()) if len(kl) else 0.0)


def _log_probabilities(rows: Tensor, probabilities: bool) -> Tensor:
    return rows.clamp(min=1e-12).log() if probabilities else rows.log_softmax(-1)


def _add_targets(sums: MetricSums, p: Tensor, q: Tensor, targets: Tensor) -> None:
    known = (targets >= 0).nonzero().reshape(-1)
    losses = [-t[known, targets[known]].double() for t in (p, q)]
    both = losses[0].isfinite() & losses[1].isfinite()
    sums.targets += int(both.sum())
    for side, loss in enumerate(losses):
        sums.nll[side] += float(loss[both].sum())


def next_token_targets(logits: Tensor, inputs: Mapping[str, Tensor]) -> Tensor | None:
    """Return the target of each position of the logits, int64 [B * T]: input_ids shifted left; -1 where none follows.

    Of an encoder-decoder they are the decoder's tokens.
    """
    ids = inputs.get(DECODER_IDS, inputs.get("input_ids"))
    if ids is None or logits.dim() != 3 or logits.shape[:2] != ids.shape:
        return None
    ids = ids.to(logits.device)
    real = inputs.get("attention_mask", torch.ones_like(ids)).to(ids.device).bool()
    following = ids.roll(-1, 1).masked_fill(~(real & real.roll(-1, 1)), -1)
    following[:, -1] = -1
    return following.masked_fill(following >= logits.shape[2], -1).reshape(-1)
