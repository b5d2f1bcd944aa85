"""Choice of the trial that is published, and of plain torch as a candidate; times are given, never taken."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from infer.errors import GateError
from infer.latency import Paired, Timing, in_turns, summarize, verdict
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.run import select, stages
from infer.run import try_backends as backends
from infer.run.float_reference import EAGER, FloatReferences
from infer.run.resolve_plan import Resolved
from infer.run.select import Selected, choose, enforce
from infer.run.trial import Trial
from infer.run.try_backends import Compressed, Trials, try_backends
from infer.spec import Choice, LayerChoice

PLAN = Plan(source="x", backend="auto", quant="none", dtype="float32", device="cpu", batches=(1, 8))
BATCHES = (1, 8)
Times = dict[int, float]


def pair(ours: float, theirs: float) -> Paired:
    ratio = ours / theirs
    return Paired(ratio, ratio, ratio, verdict(ratio, ratio), 11, summarize([ours]), summarize([theirs]))


def trial(
    backend: str,
    ours: tuple[float, float],
    rival: tuple[float, float] = (1.0, 1.0),
    forms: dict[str, Times] | None = None,
    form: str = EAGER,
    *,
    changed: bool = False,
) -> Trial:
    made = Trial(backend, Path(), [], {}, 1, 1, changed=changed)
    made.forms = forms or {form: {1: 1.0, 8: 1.0}}
    sizes = zip(BATCHES, ours, rival, strict=True)
    made.latency = [Timing(batch, pair(mine, theirs), form) for batch, mine, theirs in sizes]
    return made


def chosen(*trials: Trial, refused: tuple[str, ...] = (), plan: Plan = PLAN) -> tuple[str, str]:
    graph: Any = None
    floats = FloatReferences(graph, Path())
    tried = Trials(plan, graph, Compressed(graph, None), Path(), floats, Reporter(), list(trials))
    for name in refused:
        tried.refuse(name, "its reason")
    best = choose(tried)
    return best.trial.backend, best.choice.reason


def selected(best: Trial, *others: Trial) -> Selected:
    return Selected(best, Choice("backend", "auto", best.backend, ""), (), others=others)


def test_a_trial_timed_while_the_machine_was_slow_is_not_ranked_by_it() -> None:
    """Rank inductor, which won, over ort, which lost, though the machine was twice as slow when inductor was timed."""
    inductor = trial("inductor", (1.6, 1.6), rival=(2.0, 2.0))
    ort = trial("ort", (1.2, 1.2), rival=(1.0, 1.0))
    assert chosen(ort, inductor) == ("inductor", "the fastest here; time of the others: ort 1.50x")


def test_a_gain_at_a_large_batch_does_not_hide_a_loss_at_a_small_one() -> None:
    """Batch 8 takes most of the total, yet a call of one row would take three times as long."""
    forms = {EAGER: {1: 1.0, 8: 10.0}}
    inductor = trial("inductor", (3.0, 7.0), rival=(1.0, 10.0), forms=forms)
    ort = trial("ort", (1.0, 9.5), rival=(1.0, 10.0), forms=forms)
    backend, why = chosen(inductor, ort)
    assert backend == "ort"
    assert why == (
        "at most 1.36x of the fastest at a batch size, the others more; time of the others: inductor 0.95x"
    )


def test_trials_within_three_percent_are_ranked_by_total_time() -> None:
    assert chosen(trial("ort", (1.0, 1.02)), trial("inductor", (1.01, 1.0)))[0] == "inductor"


def test_a_backend_without_a_rival_says_what_became_of_the_others() -> None:
    """The reason stands beside a table of all that were tried and refused, and has to agree with it."""
    ort, plan = trial("ort", (0.8, 0.8), changed=True), PLAN.with_(quant="int8")
    slow = trial("openvino", (1.5, 1.5), changed=True)
    wrong = trial("inductor", (0.5, 0.5), changed=True)
    wrong.fidelity = [Metric("y", "relative_error", 0.9)]
    half = trial("ort", (0.9, 0.9), changed=True)
    half.dtype = "bfloat16"
    assert chosen(ort)[1] == "the only one there is"
    assert chosen(ort, refused=("trt",))[1] == "the only one that can run it here; refused: trt"
    assert chosen(ort, wrong, slow, half, refused=("trt", "eager"), plan=plan) == (
        "ort",
        "the only one of 4 tried that passed; inductor is not faithful enough; openvino is slower than float; "
        "ort bfloat16 gains too little; refused: trt, eager",
    )


def test_an_untimed_trial_can_be_selected() -> None:
    untimed = [Trial(name, Path(), [], {}, 1, 1, changed=False) for name in ("inductor", "ort")]
    assert chosen(*untimed) == ("inductor", "not timed")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., tuple[list[str], list[Trial]]]:
    """Run `try_backends` with a given trial of each backend; returns the backends in order, and the trials."""
    order: list[str] = []

    def run(plan: Plan, *given: Trial) -> tuple[list[str], list[Trial]]:
        by_name = {t.backend: t for t in given}

        def run_trial(plan: Plan, *_: object) -> Trial:
            order.append(plan.backend)
            made = by_name[plan.backend]
            return Trial(made.backend, Path(), [], {}, 1, 1, changed=made.changed)

        def time_trials(plan: Plan, graph: object, trials: list[Trial], *_: object) -> list[Any]:
            for one in trials:
                one.latency, one.forms = by_name[one.backend].latency, by_name[one.backend].forms
            return []

        monkeypatch.setattr(backends, "run_trial", run_trial)
        monkeypatch.setattr(backends, "time_trials", time_trials)
        monkeypatch.setattr(backends, "candidates", lambda plan, steps: [*by_name])
        monkeypatch.setattr(backends.plugins, "why_not", lambda *_: None)
        monkeypatch.setattr(backends.plugins, "get", lambda *_: Anything)
        graph: Any = SimpleNamespace(parts={})
        floats = FloatReferences(graph, tmp_path)
        return order, try_backends(plan, graph, Compressed(graph, None), tmp_path, floats).trials

    return run


class Anything:
    """A backend that takes every graph."""

    STEPS = True

    @staticmethod
    def refuses(*_: object) -> None:
        return None


def test_plain_torch_is_tried_when_all_others_lose_to_it(tried: Any) -> None:
    """The float model in torch eager is faster than what inductor and ONNX Runtime made of it: it can be published."""
    given = trial("inductor", (2.0, 1.0)), trial("ort", (1.2, 1.2)), trial("eager", (1.0, 1.0))
    order, trials = tried(PLAN, *given)
    assert order == ["inductor", "ort", "eager"]
    assert chosen(*trials)[0] == "eager"


def test_plain_torch_is_not_tried_when_one_backend_does_not_lose_to_it(tried: Any) -> None:
    given = trial("inductor", (2.0, 1.0)), trial("ort", (0.9, 1.0)), trial("eager", (1.0, 1.0))
    assert tried(PLAN, *given)[0] == ["inductor", "ort"]


def test_plain_torch_is_not_tried_for_losing_to_another_float_form(tried: Any) -> None:
    """Quantized in plain torch it could not win against compiled float code either."""
    ours = trial("inductor", (2.0, 2.0), form="inductor float32", changed=True)
    assert tried(PLAN.with_(quant="int8"), ours, trial("eager", (1.0, 1.0)))[0] == ["inductor"]


def test_a_whole_window_graph_is_rewritten_after_raised_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[Path] = []
    monkeypatch.setattr(backends.storage, "save", lambda graph, place: saved.append(place))
    monkeypatch.setattr(Anything, "STEPS", False)
    monkeypatch.setattr(backends.plugins, "get", lambda *_: Anything)
    graph: Any = None
    shape: Any = object()
    small = Compressed(graph, None, shape, windows=lambda: graph)
    for _ in range(2):
        attempt = Trials(PLAN, graph, small, tmp_path, FloatReferences(graph, tmp_path), Reporter())
        assert attempt._form("ort")[1:3] == (None, saved[-1])
    assert len(saved) == 2


def test_interleaved_calls_cancel_a_machine_that_slows_down() -> None:
    """One after the other, the second would seem slower by as much as the machine slowed down."""
    now, calls = [0.0], [0]

    def call(seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls[0] += 1
            now[0] += seconds * (1 if calls[0] <= 30 else 3)

        return run

    slow, fast = in_turns([call(1.2), call(1.0)], min_seconds=20, clock=lambda: now[0])
    assert slow.n == fast.n
    assert slow.p50 == pytest.approx(1.2 * fast.p50)


@pytest.mark.parametrize("first", [1.2, 0.9])  # slower than float, and faster
def test_raised_layers_are_tried_on_the_other_backends(
    first: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    far, near = [Metric("y", "relative_error", 0.9)], [Metric("y", "relative_error", 0.001)]
    attempts = [
        {"inductor": (trial("inductor", (0.5, 0.5)), far), "ort": (trial("ort", (0.8, 0.8)), far)},
        {"inductor": (trial("inductor", (first, first)), near), "ort": (trial("ort", (0.7, 0.7)), near)},
    ]
    order: list[str] = []
    timings: list[list[str]] = []

    def run_trial(plan: Plan, *_: object) -> Trial:
        order.append(plan.backend)
        (tmp_path / "trials" / plan.backend).mkdir(parents=True)
        return Trial(
            plan.backend,
            tmp_path / "trials" / plan.backend / "compiled",
            attempts[0][plan.backend][1],
            {},
            1,
            1,
            changed=True,
        )

    def time_trials(plan: Plan, graph: object, trials: list[Trial], *_: object) -> list[Any]:
        timings.append([one.backend for one in trials])
        for one in trials:
            timed = attempts[0][one.backend][0]
            one.latency, one.forms = timed.latency, timed.forms
        return []

    def raise_formats(*_: object) -> str:
        attempts.pop(0)
        return ""

    monkeypatch.setattr(backends, "run_trial", run_trial)
    monkeypatch.setattr(backends, "time_trials", time_trials)
    monkeypatch.setattr(backends, "candidates", lambda plan, steps: ["inductor", "ort"])
    monkeypatch.setattr(backends.plugins, "why_not", lambda *_: None)
    monkeypatch.setattr(backends.plugins, "get", lambda *_: Anything)
    graph: Any = SimpleNamespace(parts={})
    monkeypatch.setattr(stages, "compress_model", lambda *_, **__: Compressed(graph, None))
    monkeypatch.setattr(
        stages.storage, "save", lambda graph, folder: (folder / "weights").mkdir(exist_ok=True)
    )
    monkeypatch.setattr(stages.assign, "raise_formats", raise_formats)
    original: Any = SimpleNamespace(graph=graph)
    monkeypatch.setattr(stages.assign, "decide", lambda _: None)
    resolved = Resolved(PLAN.with_(quant="int8"))
    opened = stages.Opened(resolved, original, FloatReferences(graph, tmp_path))
    assignment: Any = object()
    made = stages.Run(tmp_path, Reporter(), stages.ForkingProbe()).make(opened, assignment)
    assert order == ["inductor", "ort", "inductor", "ort"]
    assert timings[-1] == ["inductor", "ort"]  # both against the float forms of both
    assert made.best.backend == "ort"


def test_a_slower_form_is_refused_with_how_many_layers_left_the_format() -> None:
    layers = (LayerChoice("a", "float", 32, by="sensitivity"), LayerChoice("b", "int8", 8))
    original: Any = SimpleNamespace(loaded=SimpleNamespace(module=None))
    graph: Any = None
    slow = trial("inductor", (1.2, 1.2), changed=True)
    plan = PLAN.with_(quant="int8")
    with pytest.raises(GateError, match="1.2.x slower.*; 1 of 2 layers left int8 to be faithful enough"):
        enforce(plan, selected(slow), original, Compressed(graph, None, layers=layers))
    with pytest.raises(GateError) as raised:
        enforce(plan, selected(slow), original, Compressed(graph, None, layers=layers[1:]))
    assert "left int8" not in str(raised.value)


@pytest.mark.parametrize(
    ("seconds", "changes", "refused"),
    [
        (1.09, {"backend": "ort"}, True),
        (1.02, {"backend": "ort"}, False),  # within noise
        (1.09, {"backend": "ort", "allow_slower": True}, False),
        (1.09, {"backend": "auto"}, False),  # the fastest of all, plain torch included
    ],
)
@pytest.mark.usefixtures("noticed")
def test_an_unchanged_model_slower_than_today_is_no_gain(
    seconds: float, changes: dict[str, Any], refused: bool
) -> None:
    nothing: Any = None
    small, plan = Compressed(nothing, None), PLAN.with_(**changes)
    slow = trial("ort", (1.0, seconds))
    if not refused:
        enforce(plan, selected(slow), nothing, small)
        return
    slow.baseline = "ONNX Runtime"
    assert slow.limitations(plan) == ["unchanged, and slower than ONNX Runtime"]
    with pytest.raises(
        GateError, match="refused, no gain: ort same at batch 1, 1.09x slower at batch 8, 1 B; against "
    ) as raised:
        enforce(plan, selected(slow), nothing, small)
    assert "--allow-slower keeps it" in str(raised.value.hint)


def test_a_loss_that_nobody_notices_is_no_reason_to_refuse() -> None:
    nothing: Any = None
    checks = trial("ort", (36e-6 + 70e-6, 5e-3), rival=(36e-6, 5e-3))
    enforce(PLAN.with_(backend="ort"), selected(checks), nothing, Compressed(nothing, None))


def quantized(
    seconds: tuple[float, float], size: int, source: int | None = 1_000_000, backend: str = "ort"
) -> Trial:
    made = trial(backend, seconds, changed=True)
    made.size, made.source_size = size, source
    return made


@pytest.mark.parametrize(
    ("seconds", "size", "refused"),
    [
        (1.08, 500_000, False),  # two sessions of one file differ by that much
        (1.08, 900_000, True),  # for a tenth of the size
        (1.2, 300_000, True),
    ],
)
def test_a_form_of_half_the_size_may_be_a_little_slower(seconds: float, size: int, refused: bool) -> None:
    nothing: Any = None
    plan, found = PLAN.with_(quant="int8"), selected(quantized((seconds, 1.0), size))
    if not refused:
        enforce(plan, found, nothing, Compressed(nothing, None))
        assert f"{seconds:.2f}x slower at batch 1" in found.trial.verdict
        return
    with pytest.raises(GateError, match="refused, slower: int8 by ort"):
        enforce(plan, found, nothing, Compressed(nothing, None))


def test_the_limit_that_ended_a_comparison_holds_for_every_plan() -> None:
    """Nothing that was left out of the comparison may be published by looser limits."""
    found = trial("ort", (0.5, 0.5), changed=True)
    found.fidelity = [Metric("y", "relative_error", 0.09)]
    loose = PLAN.with_(quant="int8", max_error=0.5)
    assert found.unfaithful(loose) is None
    found.ended = "y.relative_error 0.09 is above 0.08"
    assert found.unfaithful(loose) == found.ended


@pytest.mark.parametrize(
    ("seconds", "size", "source", "refused"),
    [
        ((1.0, 1.0), 1_000_000, 1_000_000, True),
        ((1.0, 1.0), 990_000, 1_000_000, True),  # 1 % is nothing
        ((1.0, 1.0), 2_000_000, None, True),  # of a source whose size is not known speed alone counts
        ((1.0, 1.0), 500_000, 1_000_000, False),  # smaller at no loss of speed
        ((1.0, 0.9), 2_000_000, 1_000_000, False),  # faster at a batch size, slower at none
    ],
)
def test_a_quantized_form_neither_faster_nor_smaller_is_no_gain(
    seconds: tuple[float, float], size: int, source: int | None, refused: bool
) -> None:
    nothing: Any = None
    plan, found = PLAN.with_(quant="int8"), selected(quantized(seconds, size, source))
    if not refused:
        enforce(plan, found, nothing, Compressed(nothing, None))
        return
    with pytest.raises(GateError, match="refused, no gain: int8 by ort same at batch 1, same at batch 8"):
        enforce(plan, found, nothing, Compressed(nothing, None))
    enforce(plan.with_(allow_slower=True), found, nothing, Compressed(nothing, None))
    said = found.trial.limitations(plan.with_(allow_slower=True))
    assert said == ["kept although it gains nothing (--allow-slower)"]


def test_no_gain_says_in_one_line_what_each_trial_brought() -> None:
    nothing: Any = None
    first, second = quantized((1.0, 1.0), 1_200_000), quantized((1.2, 1.2), 3_000_000, backend="inductor")
    wrong = quantized((1.0, 1.0), 1, backend="openvino")
    wrong.latency, wrong.fidelity = [], [Metric("y", "relative_error", 0.9)]
    with pytest.raises(GateError) as raised:
        enforce(PLAN.with_(quant="int8"), selected(first, second, wrong), nothing, Compressed(nothing, None))
    said = raised.value.message
    assert "\n" not in said
    assert "1.20 MB (1.2x larger); inductor 1.20x slower" in said
    assert "3.00 MB (3.0x larger); openvino is not faithful enough; against " in said
    assert said.endswith(" and a source of 1.00 MB")


def test_a_trial_that_gains_is_chosen_before_a_faster_one_that_does_not() -> None:
    equal, small = quantized((1.0, 1.0), 2_000_000, backend="inductor"), quantized((1.02, 1.02), 250_000)
    assert chosen(equal, small, plan=PLAN.with_(quant="int8"))[0] == "ort"


def test_codes_of_the_source_that_are_kept_need_no_gain() -> None:
    nothing: Any = None
    enforce(
        PLAN.with_(quant="keep"),
        selected(quantized((1.0, 1.0), 1_000_000)),
        nothing,
        Compressed(nothing, None),
    )


@pytest.mark.parametrize("faithful", [True, False])
def test_only_a_float_form_that_was_tried_is_named_instead(
    faithful: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = quantized((1.0, 1.0), 1_000_000)
    lost.forms = {
        EAGER: {1: 1.0, 8: 1.0},
        "ort float32": {1: 0.5, 8: 0.8},
        "inductor float32": {1: 1.0, 8: 0.2},
    }
    judged = list[str]()

    def is_faithful(plan: Plan, name: str, *_: object) -> bool:
        judged.append(name)
        return faithful

    monkeypatch.setattr(select, "is_faithful", is_faithful)
    floats: Any = object()
    original: Any = SimpleNamespace(graph=None)
    with pytest.raises(GateError) as raised:
        enforce(PLAN.with_(quant="int8"), selected(lost), original, Compressed(original, None), "", floats)
    hint, instead = str(raised.value.hint), "Use --quant none --backend ort, 1.25x as fast as torch eager"
    assert judged == ["ort"]
    assert (instead in hint) is faithful
    assert "--allow-slower keeps it" in hint


def test_strict_timing_refuses_what_was_timed_on_a_busy_machine() -> None:
    nothing: Any = None
    found = trial("ort", (0.5, 0.5), changed=True)
    plan = PLAN.with_(quant="int8")
    found.latency[1].missing = 1.5
    enforce(plan, selected(found), nothing, Compressed(nothing, None))
    with pytest.raises(
        GateError, match="refused, timed on a busy machine: other processes took 1.5 processors"
    ):
        enforce(plan.with_(strict_timing=True), selected(found), nothing, Compressed(nothing, None))
    found.latency[1].missing = 0.0
    enforce(plan.with_(strict_timing=True), selected(found), nothing, Compressed(nothing, None))
