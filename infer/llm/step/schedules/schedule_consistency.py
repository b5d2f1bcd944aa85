"""Comparison of a step's logits on every schedule with its own single prefill and the float model's forward."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn

from ....errors import GateError
from ....fidelity import judge
from ....fidelity.thresholds import Limits
from ....fidelity.token_errors import token_errors
from ....graph.program import Graph
from ....results import Metric
from ....spec import DECODER_IDS, Finding
from ..attention.paged_attention import use_paged_attention
from ..encoder_decoder.capture_encoder_decoder import DecoderStep, use_paged_decoder
from ..encoder_decoder.encoder_decoder_runner import sequence_runner
from ..encoder_decoder.encoder_step import HIDDEN, EncoderStep
from ..encoder_decoder.source_pages import TOKENS as SOURCE_TOKENS
from ..encoder_decoder.source_pages import Source
from ..full_sequence_runner import FullSequenceRunner
from ..paged_step import Step
from ..step_shape import SourceShape, StepShape
from .schedule_cases import LATE, SCHEDULES, SHORTER, TOKENS, prefill
from .schedule_run import Schedule, ScheduleRun, WrongShape, play

ROUTED = 2
LONGEST = 2000  # tokens of the window that is judged at late positions
MOST_PRODUCTS = 1.5e11  # that the float model takes for it, an upper bound: some 3 to 5 s on two cores
MOST_LOGITS = 1 << 27  # values of the float model's logits of it, alive for a moment
DISTINCT = 8  # token ids that the rows must hold at least; else random ones are judged
FLOAT_LIMITS = Limits(relative_error=1e-3, worst_token=1e-3, schedule=1e-3)  # 1e-6 is usual
ALONE = Schedule("prefill", "one prefill", (0,), prefill)


def spared_tokens(graph: Graph) -> int:
    """Return how many tokens of a schedule are not judged: two in models with a router, else none.

    A router sends a token that is near a tie to another expert for the rounding of a lower format. Models with `topk`
    in their graph count as such.
    """
    return ROUTED if any("topk" in str(node.target) for node in graph.nodes) else 0


class WorstToken(NamedTuple):
    """Token with the largest error, and its schedule."""

    error: float
    position: int
    words: str


def judged_windows(ids: Tensor, vocab_size: int, longest: int) -> list[Tensor]:
    """Return two sequences of different lengths, at most `longest` tokens, from rows of token ids.

    The rows are joined in order, and repeated where they are too short; random ids are used where they hold too few
    different ones. Random ids may be padding, which some models (M2M100) do not count as a position.
    """
    flat = _joined(ids, vocab_size, TOKENS + SHORTER)
    return [flat[: min(TOKENS, longest)], flat[-min(SHORTER, max(longest - 1, 1)) :]]


def late_window(ids: Tensor, vocab_size: int, longest: int, weights: int) -> Tensor | None:
    """Return a sequence of up to `LONGEST` tokens, as many as a float model of `weights` weights computes in seconds.

    None where the other windows are as long.
    """
    affordable = min(int(MOST_PRODUCTS / max(weights, 1)), MOST_LOGITS // max(vocab_size, 1))
    count = min(LONGEST, longest, affordable)
    return _joined(ids, vocab_size, count)[:count] if count > TOKENS + SHORTER else None


def _joined(ids: Tensor, vocab_size: int, least: int) -> Tensor:
    """Join rows of token ids, repeated to `least` tokens; random ids where they hold too few different ones."""
    flat = ids.flatten().cpu()
    if len(flat.unique()) < DISTINCT:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(0, vocab_size, (least,), generator=generator)
    return flat.repeat(-(-least // len(flat))) if len(flat) < least else flat


def compare_schedules(
    stepping: FullSequenceRunner,
    windows: Sequence[Tensor],
    reference: Callable[..., Tensor],
    *,
    late: Tensor | None = None,
    spared: int = 0,
    sources: Sequence[Source] = (),
    in_lockstep: bool = False,
) -> list[Metric]:
    """Compare all schedules; `reference` returns the float model's logits [tokens, vocab] of one window.

    Of an encoder-decoder it is called with the window and its source, one of `sources` for each window. Of `late`, a
    long window, a few positions are compared, mostly at its end; `reference` is given those as `rows`.

    One metric per schedule: its worst token against one prefill by the same step. Two over all schedules, against the
    float model: the worst token, and the largest relative error of a schedule. `spared`: tokens of a schedule that may
    be worse than its worst. `in_lockstep`: a call of the step holds one of every schedule: a third of the calls, but
    few with a sequence alone in them.
    """
    try:
        alone = [
            _rows(play(stepping, [(ALONE, [ids])], sources[i : i + 1])[0].logits[0])[1]
            for i, ids in enumerate(windows)
        ]
    except WrongShape as error:
        return [Metric("prefill", "shape", False, detail=str(error))]
    floats: list[Logits] = [
        reference(ids, *sources[i : i + 1]).detach().cpu() for i, ids in enumerate(windows)
    ]
    cases = [*SCHEDULES, *([] if late is None else [LATE])]
    found: list[Metric] = []
    worst, largest = WorstToken(-1.0, 0, ""), WorstToken(-1.0, 0, "")
    for group in [cases] if in_lockstep else [[case] for case in cases]:
        played = [
            (case, [late] if late is not None and case is LATE else [windows[i] for i in case.sequences])
            for case in group
        ]
        given = [sources[i] for case in group for i in case.sequences] if sources else ()
        try:
            runs = play(stepping, played, given)
        except WrongShape as error:
            words = group[0].words if len(group) == 1 else "all schedules in lockstep"
            found.append(Metric(group[0].name, "shape", False, detail=f"{words}: {error}"))
            continue
        for case, run in zip(group, runs, strict=True):
            wanted = floats
            if late is not None and case is LATE:
                positions, _ = _rows(run.logits[0])
                rows = reference(late, *sources[:1], rows=positions).detach().cpu()
                wanted = [dict(zip(positions, rows, strict=True))]
            else:
                own = _worst(alone, run, case, spared)
                found.append(Metric(case.name, "schedule_error", own.error, detail=_why(own, "one prefill")))
            worst = max(worst, _worst(wanted, run, case, spared))
            largest = max(largest, WorstToken(_relative(wanted, run, case), 0, case.words))
    found.append(Metric("schedules", "worst_token", worst.error, detail=_why(worst, "the float model")))
    why = f"against the float model, {_tried(windows, late)}, the worst: {largest.words}"
    return [*found, Metric("schedules", "relative_error", largest.error, detail=why)]


def judged_sources(source: SourceShape, samples: Mapping[str, Tensor]) -> list[Source]:
    """Return two sources of samples: token ids of different lengths, the first and last one of sound or images."""
    found: list[dict[str, Tensor]] = [{}, {}]
    if source.features:
        found = [{source.name: samples[source.name][row]} for row in (0, -1)]
    if source.reads_text:
        first, second = judged_windows(samples[SOURCE_TOKENS], source.vocab_size, source.max_tokens)
        found = [{**one, SOURCE_TOKENS: ids} for one, ids in zip(found, (second, first), strict=True)]
    return [*found]


def require_float_step(
    model: nn.Module,
    shape: StepShape,
    ids: Tensor,
    samples: Mapping[str, Tensor] | None = None,
    reference: Callable[..., Tensor] | None = None,
) -> list[Finding]:
    """Judge the float model's own code as a step, over a float32 cache, before anything is lowered.

    `samples`: sources of an encoder-decoder by the names of their tensors, batch first. `reference`: as in
    `compare_schedules`, where it is cached for what is lowered; else `model` is called.

    Raises `GateError` when a schedule gives other logits than the model's forward.
    """
    windows = judged_windows(ids, shape.vocab_size, shape.max_positions)
    weights = sum(parameter.numel() for parameter in model.parameters())
    late = late_window(ids, shape.vocab_size, shape.max_positions, weights)
    place = str(next(model.parameters()).device)

    def forward(ids: Tensor, given: Source | None = None, rows: Sequence[int] | None = None) -> Tensor:
        named = {"input_ids": ids[None].to(place)}
        if given is not None:
            source = {name: value[None].to(place) for name, value in given.items()}
            named = {DECODER_IDS: named["input_ids"], **source}
        with torch.no_grad():
            logits = model(**named, use_cache=False).logits[0]
        return (logits if rows is None else logits[list(rows)]).float()  # type: ignore[no-any-return]

    layout = msgspec.structs.replace(shape, kv_dtype="float32", adapters=None)
    stepping = sequence_runner(Uncaptured(model, layout, place), layout, place)
    sources = () if shape.source is None or samples is None else judged_sources(shape.source, samples)
    found = compare_schedules(
        stepping, windows, reference or forward, late=late, sources=sources, in_lockstep=True
    )
    if reason := judge(found, FLOAT_LIMITS, None):
        raise GateError(
            f"refused, the float model can't be run in steps over a paged cache: {reason}",
            hint="Nothing was published. A layer of the model keeps state between calls, mixes sequences or "
            "counts places instead of positions; use a model whose only state is the KV cache",
        )
    worst = max(float(metric.value) for metric in found if isinstance(metric.value, float))
    why = f"float32, {_tried(windows, late)}: worst error of a token's logits"
    return [Finding("capture", "float step", worst, why=why)]


class Uncaptured:
    """Step of a model, and its encoder, as its own code runs them, not captured."""

    def __init__(self, model: nn.Module, shape: StepShape, device: str) -> None:
        kind, self._paged = (
            (Step, use_paged_attention) if shape.source is None else (DecoderStep, use_paged_decoder)
        )
        self._model, self._device, self._step = model, device, kind(model, shape.page, shape.kv_dtype)
        self._encoder = None if shape.source is None else EncoderStep(model, shape.page, shape.kv_dtype)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given: Any = {name: value.to(self._device) for name, value in inputs.items()}
        with torch.no_grad():
            if self._encoder is not None and "token_ids" not in given:
                return {HIDDEN: self._encoder(**given)}
            with self._paged(self._model):
                return {"logits": self._step(**given)}


def _tried(windows: Sequence[Tensor], late: Tensor | None) -> str:
    tokens = " and ".join(str(len(ids)) for ids in windows)
    return f"{len(SCHEDULES)} schedules of {tokens} tokens" + (
        "" if late is None else f", one of {len(late)}"
    )


def _why(worst: WorstToken, other: str) -> str:
    if worst.error == 0:
        return f"{worst.words} equals {other} at every position"
    return f"{worst.words} differs most from {other} at position {worst.position}"


def _rows(logits: Mapping[int, Tensor]) -> tuple[list[int], Tensor]:
    """Return the positions of a schedule in order, and their logits [positions, vocab]."""
    positions = sorted(logits)
    return positions, _at(logits, positions)


Logits = Tensor | Mapping[int, Tensor]  # by position


def _at(logits: Logits, positions: Sequence[int]) -> Tensor:
    if isinstance(logits, Tensor):
        return logits[list(positions)]
    return torch.stack([logits[position] for position in positions])


def _worst(expected: Sequence[Logits], run: ScheduleRun, schedule: Schedule, spared: int) -> WorstToken:
    tokens: list[WorstToken] = []
    for window, logits in zip(schedule.sequences, run.logits, strict=True):
        positions, rows = _rows(logits)
        errors = token_errors(_at(expected[window], positions), rows).tolist()
        tokens += [
            WorstToken(e, position, schedule.words) for e, position in zip(errors, positions, strict=True)
        ]
    tokens.sort(reverse=True)
    return tokens[0 if math.isinf(tokens[0].error) else min(spared, len(tokens) - 1)]


def _relative(expected: Sequence[Logits], run: ScheduleRun, schedule: Schedule) -> float:
    """Return the Frobenius norm of the difference over that of the float logits, of all sequences of a schedule."""
    difference = norm = 0.0
    for window, logits in zip(schedule.sequences, run.logits, strict=True):
        positions, rows = _rows(logits)
        wanted = _at(expected[window], positions).double()
        finite = wanted.isfinite() & rows.isfinite()
        difference += float((rows.double() - wanted).where(finite, 0.0).square().sum())
        norm += float(wanted.where(finite, 0.0).square().sum())
    return (difference / norm) ** 0.5 if norm else 0.0
