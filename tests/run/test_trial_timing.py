"""The fastest float form that was tried is what a trial is compared with; times are given, never taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infer import latency
from infer.device import processors
from infer.errors import InputError, NotUsableError
from infer.graph import capture, storage
from infer.graph.program import Graph, plain_call
from infer.latency import Paired, Timing, summarize
from infer.llm.step.full_sequence_runner import FullSequenceRunner
from infer.plan import Plan
from infer.predict.input_fast_path import FastInputs
from infer.predict.tensors import CheckedRunner
from infer.reporter import Reporter
from infer.run import compilation_bounds, run_trial, stages, trial_timing, try_backends
from infer.run.compilation_bounds import CompilationBound
from infer.run.float_reference import EAGER, FloatReferences
from infer.run.original_runners import Eager, UserModuleRunner
from infer.run.resolve_plan import resolve
from infer.run.run_trial import is_faithful
from infer.run.trial import TimesToBeat, Trial
from infer.run.trial_timing import TimingRules
from infer.run.try_backends import Compressed
from infer.spec import TensorSpec

PLAN = Plan(source="x", backend="auto", quant="int8", dtype="float32", device="cpu", batches=(1, 8))


class Net(nn.Module):
    """Two inputs, given by keyword in another order than forward names them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        return self.linear(x).relu() + shift


def graph(module: nn.Module | None = None) -> Graph:
    specs = (TensorSpec("shift", "float32", ("batch", 4)), TensorSpec("x", "float32", ("batch", 16)))
    samples = {"shift": torch.randn(8, 4), "x": torch.randn(8, 16)}
    return capture.capture(module or Net().eval(), specs, samples, sizes={"batch": (1, 64)}, outputs=("y",))


class Named:
    """A runner that is known by its seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = dict(zip((1, 8), seconds, strict=True))


class Call(float):
    """A call that does nothing and is known by its seconds."""

    def __call__(self) -> None:
        return None


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes what its runner says."""

    def paired(ours: Any, theirs: Any, **_: object) -> Paired:
        ratio = ours / theirs
        verdict = "slower" if ratio > 1.03 else "faster" if ratio < 0.97 else "same"
        return Paired(ratio, ratio, ratio, verdict, 11, summarize([ours]), summarize([theirs]))

    monkeypatch.setattr(
        trial_timing, "call_of", lambda runner, graph, batch, served=False: Call(runner.seconds[batch])
    )

    def measure(seconds: float, **_: object) -> SimpleNamespace:
        return SimpleNamespace(own=seconds)

    def in_turns(calls: list[float], **_: object) -> list[SimpleNamespace]:
        return [measure(seconds) for seconds in calls]

    monkeypatch.setattr(
        trial_timing,
        "latency",
        SimpleNamespace(**vars(latency) | {"paired": paired, "measure": measure, "in_turns": in_turns}),
    )


def trial(backend: str, *seconds: float) -> Trial:
    return Trial(backend, Path(), [], {}, 1, 1, changed=True, runner=Named(*seconds))


class Forms(FloatReferences):
    """Float forms with given times, and a note of what was lowered."""

    def __init__(self, original: Graph, **seconds: tuple[float, float]) -> None:
        super().__init__(original, Path())
        self.seconds, self.lowered = seconds, list[str]()

    def runner(self, plan: Plan, shape: object = None) -> Named:
        self.lowered.append(plan.backend)
        if plan.backend not in self.seconds:
            raise NotUsableError(f"{plan.backend} can't")
        return Named(*self.seconds[plan.backend])

    def _plain(self, plan: Plan, shape: object) -> Named:
        return Named(*self.seconds["plain"])


def timed(plan: Plan, trials: list[Trial], forms: Forms, rules: TimingRules | None = None) -> list[str]:
    found = trial_timing.time_trials(
        plan, graph(), trials, forms, lambda *_: None, lambda trial, error: trials.remove(trial), rules
    )
    return [f.what for f in found]


@pytest.mark.usefixtures("given")
def test_the_fastest_float_form_of_any_backend_is_the_baseline() -> None:
    """An int8 form at 23 ms is slower than torch.compile's 18 ms, whatever its own backend takes in float."""
    ours = trial("ort", 0.023, 0.1)
    found = timed(PLAN, [ours], Forms(graph(), plain=(0.05, 0.2), ort=(0.04, 0.2), inductor=(0.018, 0.2)))
    assert ours.slower
    assert "1.28x slower at batch 1" in ours.verdict
    assert "the fastest float form (inductor float32 at batch 1, torch eager at batch 8)" in ours.verdict
    assert ours.verdicts(PLAN)[2] == (
        "float forms tried, at batch 1, 8: torch eager 50.0 ms, 200 ms; ort float32 40.0 ms, 200 ms; "
        "inductor float32 18.0 ms, 200 ms"
    )
    assert found == ["float form torch eager", "float form ort float32", "float form inductor float32"]


@pytest.mark.usefixtures("given")
def test_auto_does_not_lower_float_forms_of_much_slower_backends() -> None:
    forms = Forms(graph(), plain=(1.0, 1.0), inductor=(1.0, 1.0), ort=(1.0, 1.0))
    timed(PLAN, [trial("inductor", 0.1, 0.1), trial("ort", 2.0, 2.0)], forms)
    assert forms.lowered == ["inductor"]


@pytest.mark.usefixtures("given")
def test_a_later_trial_is_timed_against_earlier_float_forms(tmp_path: Path) -> None:
    """Plain torch in int8, tried last, is compared with the float form of ONNX Runtime too."""
    made, first, last = graph(), trial("ort", 0.8, 0.8), trial("eager", 0.9, 0.9)
    forms = FloatReferences(made, tmp_path, module=Net().eval())
    forms._plain = lambda plan, shape: Named(1.0, 1.0)  # type: ignore[method-assign]
    forms._runners = {"float-inductor": Named(1.0, 1.0), "float-ort": Named(0.7, 0.7)}
    for ours in (first, last):
        timed(PLAN, [ours], forms)  # type: ignore[arg-type]
    assert first.forms == last.forms
    assert "1.29x slower at batch 1" in last.verdict


@pytest.mark.usefixtures("given")
def test_a_named_backend_is_compared_with_itself_and_plain_torch() -> None:
    ours, forms = trial("ort", 0.9, 0.9), Forms(graph(), plain=(0.5, 1.0), ort=(1.0, 1.1))
    timed(PLAN.with_(backend="ort"), [ours], forms)
    assert forms.lowered == ["ort"], "compiling with inductor takes long and was not asked for"
    assert ours.slower
    assert "against the fastest float form (torch eager)" in ours.verdict


@pytest.mark.usefixtures("given")
def test_a_float_form_that_fails_is_reported() -> None:
    ours = trial("ort", 0.9, 0.9)
    found = timed(PLAN.with_(backend="ort"), [ours], Forms(graph(), plain=(1.0, 1.0)))
    assert found == ["no ort float32", "float form torch eager"]
    assert ours.baseline == EAGER


@pytest.mark.usefixtures("given")
def test_a_trial_that_fails_at_a_batch_size_does_not_stop_the_others() -> None:
    broken, ours = trial("ort", 0.9, 0.9), trial("inductor", 0.9, 0.9)
    broken.runner.seconds.clear()
    trials = [broken, ours]
    timed(PLAN, trials, Forms(graph(), plain=(1.0, 1.0), inductor=(1.0, 1.0)))
    assert trials == [ours]
    assert ours.verdict.startswith("1.11x faster")


@pytest.mark.usefixtures("given")
def test_a_float_plan_is_timed_against_plain_torch_alone() -> None:
    ours, forms = trial("ort", 0.9, 0.9), Forms(graph(), plain=(1.0, 1.0), ort=(1.0, 1.0))
    timed(PLAN.with_(quant="none"), [ours], forms)
    assert (ours.baseline, forms.lowered) == (EAGER, [])


@pytest.mark.parametrize(
    ("decode", "prompt", "slower"), [(0.5, 1.5, False), (0.9, 40.0, True), (1.1, 0.1, True)]
)
def test_prompts_count_in_the_time_of_a_request(decode: float, prompt: float, slower: bool) -> None:
    """A decode step of 1 ms, 128 of them to an answer, and a prompt of 20 ms: whole requests must not be slower."""

    def pair(ratio: float, seconds: float) -> Paired:
        verdict = "slower" if ratio > 1.03 else "faster"
        return Paired(ratio, ratio, ratio, verdict, 11, summarize([seconds * ratio]), summarize([seconds]))

    made = trial("inductor", 1.0, 1.0)
    made.latency, made.prompt = [Timing(1, pair(decode, 1e-3))], pair(prompt, 20e-3)
    assert made.slower is slower
    assert f"reading a prompt {prompt:.2f}x slower" in made.verdict or prompt < 1


def test_the_eager_baseline_is_the_users_own_module(tmp_path: Path) -> None:
    module = Net().eval()
    made = graph(module)
    plain = FloatReferences(made, tmp_path, module=module)._plain(PLAN, None)
    assert isinstance(plain, UserModuleRunner)
    torch.testing.assert_close(plain.run(made.samples), made.run(made.samples))


def test_a_plain_call_equals_the_program_for_any_input_order() -> None:
    made = graph()
    call = plain_call(made.exported, made.inputs)
    for rows in (1, 5):
        inputs = {name: value[:rows] for name, value in reversed(made.samples.items())}
        (got,) = call(inputs)
        assert torch.equal(got, made.run(inputs)["y"])


FITS = FastInputs(
    (TensorSpec("a", "float32", ("batch", 3)), TensorSpec("b", "int64", ("batch",))), {"batch": (1, 4)}
)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (np.zeros((2, 3), "float64"), np.zeros(2, "int64")),
        (np.zeros((2, 4), "float32"), np.zeros(2, "int64")),
        (np.zeros((2, 3), "float32"), np.zeros(3, "int64")),
        (np.zeros((5, 3), "float32"), np.zeros(5, "int64")),
        (np.zeros((0, 3), "float32"), np.zeros(0, "int64")),
        (np.zeros((2, 3, 1), "float32"), np.zeros(2, "int64")),
        ([[0.0] * 3], np.zeros(1, "int64")),
        (torch.zeros(2, 3, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)),
    ],
    ids=["dtype", "size", "rows differ", "too many", "none", "rank", "a list", "half"],
)
def test_only_matching_inputs_take_the_fast_path(a: Any, b: Any) -> None:
    assert FITS.tensors({"a": a, "b": b}) is None


def test_matching_inputs_become_tensors_in_the_order_of_the_specs() -> None:
    given = {"b": np.arange(2), "a": np.ones((3, 2), "float32").T}
    found = FITS.tensors(given)
    assert list(found) == ["a", "b"]
    assert found["a"].is_contiguous()
    assert FITS.tensors({"a": given["a"]}) is None
    assert FITS.tensors({**given, "c": given["b"]}) is None


def test_the_input_fast_path_equals_the_checked_path() -> None:
    made = graph()
    calls = CheckedRunner(made.inputs, made.outputs, made.sizes, SimpleNamespace(run=made.run))
    arrays = {name: value.numpy() for name, value in made.samples.items()}
    short, long = calls.predict(arrays)["y"], calls.predict([arrays])[0]["y"]
    assert isinstance(short, np.ndarray)
    np.testing.assert_array_equal(short, long)
    assert isinstance(calls.predict(dict(made.samples))["y"], Tensor)
    many = {name: np.repeat(value, 9, axis=0) for name, value in arrays.items()}
    assert len(calls.predict(many)["y"]) == 72, "more rows than the largest batch run in pieces"
    with pytest.raises(InputError, match="missing input 'x'"):
        calls.predict({"shift": arrays["shift"]})


class Scripted:
    """Calls that take given seconds of a clock of their own."""

    def __init__(self, *streams: list[float]) -> None:
        self.now, self.streams = 0.0, [iter(one) for one in streams]

    def call(self, index: int) -> None:
        self.now += next(self.streams[index])


FULL: dict[str, Any] = {"max_seconds": 4.0, "max_pairs": 200}
BRIEF: dict[str, Any] = {"max_seconds": 1.0, "min_pairs": 5}


@pytest.mark.parametrize("full", [FULL, BRIEF], ids=["judged by a gate", "a float form"])
@pytest.mark.parametrize("seed", range(40))
def test_a_short_round_is_enough_only_where_the_full_one_says_no_more(
    seed: int, full: dict[str, Any]
) -> None:
    draw = np.random.default_rng(seed)
    base, ratio = draw.choice([0.003, 0.03, 0.3]), draw.choice([0.3, 0.9, 1.0, 1.5])
    noise = draw.choice([0.01, 0.3])
    ours, theirs = ((base * x * draw.lognormal(0, noise, 3000)).tolist() for x in (ratio, 1.0))
    ends = []
    for limits in ({"min_pairs": 5, "max_seconds": 0.5}, full):
        script = Scripted(ours, theirs)
        calls = partial(script.call, 0), partial(script.call, 1)
        ends.append(latency.paired(*calls, clock=lambda script=script: script.now, **limits))
    short, whole = ends
    if latency.is_enough(short, **full):
        assert short.verdict == whole.verdict
        assert short.pairs >= min(whole.pairs, full.get("min_pairs", 11))


def recorded_rounds(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """Return the list of what is paired from now on: the call of a trial, and the seconds allowed."""
    rounds: list[tuple[float, float]] = []
    usual = trial_timing.latency.paired

    def paired(ours: Any, theirs: Any, **limits: Any) -> Paired:
        rounds.append((float(ours), limits["max_seconds"]))
        return usual(ours, theirs)

    monkeypatch.setattr(trial_timing.latency, "paired", paired)
    return rounds


def test_a_batch_size_that_the_short_round_decided_is_not_timed_again(
    given: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = recorded_rounds(monkeypatch)
    monkeypatch.setattr(trial_timing.latency, "is_enough", lambda pair, **_: pair.a.p50 == 8.0, raising=False)
    forms = Forms(graph(), plain=(10.0, 80.0), ort=(2.0, 16.0))
    rules = TimingRules(to_beat=TimesToBeat({"ort float32": {1: 0.5, 8: 0.5}}))
    fast = trial("ort", 1.0, 8.0)
    timed(PLAN.with_(backend="ort"), [fast], forms, rules)
    short, full = trial_timing.SHORT_SECONDS, trial_timing.PAIR_SECONDS
    assert rounds == [(1.0, short), (8.0, short), (1.0, full)]
    assert [one.batch for one in fast.latency] == [1, 8]


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[float]]:
    """Processors that other processes take from each timing, the last for ever after; and the waits for them."""
    missing, waits = list[float](), list[float]()

    def wait(threads: int, seconds: float) -> float:
        waits.append(seconds)
        return 15.0

    def load() -> SimpleNamespace:
        return SimpleNamespace(excess=lambda threads: missing.pop(0) if len(missing) > 1 else missing[0])

    now = iter(range(0, 100_000, 5))
    monkeypatch.setattr(trial_timing, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    monkeypatch.setattr(trial_timing, "OtherLoad", load)
    monkeypatch.setattr(trial_timing, "MOST_WAITED", 20.0)
    monkeypatch.setattr(trial_timing, "MOST_MISSING", processors.MOST_MISSING)
    monkeypatch.setattr(trial_timing, "wait_until_quiet", wait)
    return missing, waits


ONCE = PLAN.with_(backend="ort", batches=(1,))


@pytest.mark.usefixtures("given")
def test_a_disturbed_timing_waits_and_is_made_again(others: tuple[list[float], list[float]]) -> None:
    missing, waits = others
    missing += [1.5, 0.0]
    ours = trial("ort", 0.5, 0.5)
    timed(ONCE, [ours], Forms(graph(), plain=(1.0, 1.0), ort=(1.0, 1.0)))
    assert (len(waits), ours.busy, len(ours.latency)) == (1, "", 1)


@pytest.mark.usefixtures("given")
def test_a_disturbed_second_session_of_a_file_is_not_called_slower(
    others: tuple[list[float], list[float]],
) -> None:
    """Two sessions of one file with the same settings differ by what disturbs them."""
    others[0].append(1.5)
    plan = ONCE.with_(quant="none", backend="eager")
    verdicts = {}
    for cautious in ("", "with an option that costs speed"):
        ours = trial("eager", 2.0, 2.0)
        ours.changed, ours.cautious = False, cautious
        timed(plan, [ours], Forms(graph(), plain=(1.0, 1.0), eager=(3.0, 3.0)))
        verdicts[cautious] = ours.latency[0].pair.verdict
    assert verdicts == {"": "within noise", "with an option that costs speed": "slower"}


def noisy_pair(*_: object, **__: object) -> Paired:
    """Fourteen times faster by the median, by the shortest calls no faster at all."""
    ours, theirs = summarize([1.0, 1.0, 1.0]), summarize([1.0, 14.0, 14.0])
    return Paired(1 / 14, 0.057, 0.763, "faster", 11, ours, theirs)


@pytest.mark.usefixtures("given")
def test_a_machine_that_stays_busy_is_said_and_no_speed_claimed(
    others: tuple[list[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    missing, waits = others
    missing.append(1.5)
    monkeypatch.setattr(trial_timing.latency, "paired", noisy_pair)
    ours = trial("ort", 0.5, 0.5)
    ours.source_size = 100
    timed(ONCE, [ours], Forms(graph(), plain=(1.0, 1.0), ort=(1.0, 1.0)))
    assert 1 <= len(waits) <= 2, "the wait is bounded"
    assert ours.limitations(ONCE) == ["timed on a busy machine: other processes took 1.5 processors"]
    assert ours.verdict.startswith("within noise at batch 1")


@pytest.mark.usefixtures("given")
def test_a_gain_is_confirmed_against_each_form_that_may_be_the_fastest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Brief timings were disturbed and chose the slower form as the rival: the gain over it is none over the other."""

    def in_turns(calls: list[float], **_: object) -> list[SimpleNamespace]:
        return [SimpleNamespace(own=seconds * (1.4 if seconds == 0.02 else 1.0)) for seconds in calls]

    monkeypatch.setattr(trial_timing.latency, "in_turns", in_turns)
    ours = trial("ort", 0.02, 0.01)
    forms = Forms(graph(), plain=(0.5, 0.5), ort=(0.02, 0.02), openvino=(0.025, 0.025))
    timed(PLAN, [ours, trial("openvino", 0.02, 0.03)], forms)
    assert ours.verdict == (
        "same at batch 1, 2.00x faster at batch 8 against the fastest float form (ort float32)"
    )


@pytest.mark.parametrize(
    ("seconds", "asked", "taken"),
    [(0.5, (1, 8), (1,)), (0.1, (1, 8), (1, 8)), (0.5, (4, 8), (4, 8))],
    ids=["slow", "quick", "slow, sizes named"],
)
def test_of_a_slow_model_only_the_smallest_default_batch_is_timed(
    seconds: float, asked: tuple[int, ...], taken: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    reporter = Reporter()
    run = resolve(PLAN.with_(batches=asked, quant="none"), Reporter())
    monkeypatch.setattr(latency, "measure", lambda *_, **__: SimpleNamespace(min=seconds))
    found = stages.within_seconds(run, FloatReferences(graph(), Path()), reporter)
    assert found.plan.batches == taken
    said = [f"{one.what}: {one.why}" for one in reporter.findings]
    assert said == (
        ["batch 8: not timed: a row of the original takes 500 ms; --batch 8 times it"]
        if taken == (1,)
        else []
    )


@pytest.mark.parametrize(
    ("data", "quant", "compared"),
    [("ours", "none", 8), ("random", "none", 8), ("rows.npz", "none", 64), (None, "none", 64), ("ours", "int8", 24)],
)  # fmt: skip
def test_a_slow_model_is_compared_on_few_rows_only_of_ours(
    data: str | None, quant: str, compared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = replace(graph(), samples={"shift": torch.randn(64, 4), "x": torch.randn(64, 16)})
    floats, seen = FloatReferences(original, Path()), list[int]()
    monkeypatch.setattr(FloatReferences, "row_seconds", 0.5)
    plan = PLAN.with_(data=data, quant=quant)
    most = run_trial._most_rows(plan, floats, original)
    monkeypatch.setattr(run_trial, "_at_values", lambda *_: [])
    run = Eager(original).run
    watched = SimpleNamespace(run=lambda inputs: seen.append(len(inputs["x"])) or run(inputs))
    run_trial._compare(plan, floats.reference(), watched, original, original.outputs, most)
    assert max(seen) == compared
    said = run_trial._compared(most, floats, original)
    assert said == (
        f"compared on {compared} rows, in batches of {compared} at most: one takes 500 ms in the original"
        if compared < 64
        else ""
    )


def test_seconds_of_a_row_are_not_asked_where_they_decide_nothing() -> None:
    """Text is judged by tokens, and streamed weights are read once more by each call."""
    texts = FloatReferences(replace(graph(), task="text-generation"), Path())
    assert texts.row_seconds == 0.0
    assert FloatReferences(graph(Net().eval()), Path()).row_seconds > 0.0


@pytest.mark.usefixtures("given")
def test_a_wide_interval_is_timed_again(
    others: tuple[list[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    others[0].append(0.0)
    usual, rounds = trial_timing.latency.paired, list[int]()

    def paired(ours: Any, theirs: Any, **limits: Any) -> Paired:
        rounds.append(1)
        return noisy_pair() if len(rounds) == 1 else usual(ours, theirs)

    monkeypatch.setattr(trial_timing.latency, "paired", paired)
    ours = trial("ort", 0.5, 0.5)
    timed(ONCE, [ours], Forms(graph(), plain=(2.0, 2.0), ort=(1.0, 1.0)))
    assert ours.verdict.startswith("2.00x faster at batch 1")
    assert (len(rounds), ours.busy) == (2, "")


@pytest.mark.usefixtures("given")
def test_an_interval_that_stays_wide_on_a_quiet_machine_ends(
    others: tuple[list[float], list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is waited for there, so that no limit of waiting is ever reached."""
    others[0].append(0.0)
    monkeypatch.setattr(trial_timing, "wait_until_quiet", lambda *_: 0.0)
    rounds: list[Paired] = []

    def paired(*_: object, **__: object) -> Paired:
        rounds.append(noisy_pair())
        assert len(rounds) < 50, "without an end"
        return rounds[-1]

    monkeypatch.setattr(trial_timing.latency, "paired", paired)
    ours = trial("ort", 0.5, 0.5)
    timed(ONCE, [ours], Forms(graph(), plain=(1.0, 1.0), ort=(1.0, 1.0)))
    assert len(rounds) == trial_timing.AGAIN
    assert (ours.busy, ours.verdict.startswith("within noise at batch 1")) == ("", True)


def wrong_forms(original: Graph) -> Forms:
    return Forms(original, plain=(1e-9, 1e-9), ort=(1.0, 1.0), inductor=(1e-10, 1e-10))


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(
    "seconds", [0.5, 1e-10], ids=["it lost to another form", "kernels alone take longer"]
)
def test_a_form_that_can_not_change_the_verdict_is_not_compiled(seconds: float) -> None:
    """Neither where each trial is slower than a form that is known, nor where kernels alone take longer than that."""
    forms = wrong_forms(graph())
    found = timed(PLAN, [trial("ort", seconds, seconds)], forms)
    assert forms.lowered == ["ort"]
    assert "no inductor float32" in found


@pytest.mark.parametrize(
    ("data", "length", "rows"), [("ours", 128, 16), ("ours", 9000, 8), ("texts.txt", 128, run_trial.MAX_ROWS)]
)
def test_texts_of_ours_are_compared_on_enough_tokens_and_no_more(data: str, length: int, rows: int) -> None:
    ids = TensorSpec("input_ids", "int64", ("batch", "seq"))
    samples = {"input_ids": torch.ones(128, length, dtype=torch.int64)}
    original = replace(graph(), task="text-generation", inputs=(ids,), samples=samples)
    floats = FloatReferences(original, Path())
    for quant in ("none", "int8"):
        assert run_trial._most_rows(PLAN.with_(data=data, quant=quant), floats, original) == rows
    assert run_trial._compared(rows, floats, original) == ""  # the number of tokens is among the metrics


class Step(FullSequenceRunner):
    """Float step that does nothing."""

    def __init__(self) -> None:
        return

    def decoding(self, batch: int) -> Callable[[], dict[str, Tensor]]:
        return dict


@pytest.mark.parametrize(("bound", "ours", "lowered"), [(2.0, 1.0, False), (0.5, 1.0, True)])
def test_a_float_step_is_compiled_only_where_it_may_be_as_fast(
    bound: float, ours: float, lowered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compilation_bounds, "of_call", lambda _: CompilationBound(bound, 0.5))
    step = trial("inductor", ours, ours)
    step.brief = {1: ours, 8: ours}
    forms = [trial_timing.FloatForm("torch eager", Step(), {1: 3.0, 8: 3.0})]
    reason = trial_timing._why_no_float_step(forms, [step])
    assert bool(reason) is not lowered
    assert lowered or reason == "its kernels alone take 2.00 s at batch 8, the model in all 1.00 s"


@pytest.mark.parametrize(
    ("openvino", "size", "slower"),
    [(1.3, 1, False), (1.05, 1, True), (1.3, 10, True)],
    ids=["each form loses somewhere", "one form wins", "as large"],
)
def test_a_smaller_model_is_slower_where_one_float_form_beats_it(
    openvino: float, size: int, slower: bool
) -> None:
    """At batch 1 ONNX Runtime is the fastest, at batch 8 OpenVINO: 1.2 times as fast as this trial."""

    def pair(ratio: float, verdict: str) -> Paired:
        return Paired(ratio, ratio, ratio, verdict, 11, summarize([ratio]), summarize([1.0]))

    latency = [
        Timing(1, pair(1.0, "same"), "ort float32"),
        Timing(8, pair(1.2, "slower"), "openvino float32"),
    ]
    made = replace(trial("ort", 1.0, 1.0), size=size, source_size=10, latency=latency)
    made.forms = {"ort float32": {1: 1.0, 8: 1.2}, "openvino float32": {1: openvino, 8: 1.0}}
    assert made.slower is slower


@pytest.mark.parametrize(
    ("size", "seconds", "slower"),
    [(1, 40e-6, False), (1, 190e-6, True), (10, 40e-6, True)],
    ids=["smaller, by the checks", "smaller, by more", "as large"],
)
def test_the_checks_of_a_request_refuse_no_smaller_model(size: int, seconds: float, slower: bool) -> None:
    pair = Paired(1.2, 1.1, 1.3, "slower", 11, summarize([200e-6 + seconds]), summarize([200e-6]))
    made = replace(trial("ort", 1.0, 1.0), size=size, source_size=10, latency=[Timing(1, pair)])
    assert made.slower is slower


@pytest.mark.usefixtures("given")
def test_steps_of_timing_say_about_how_long_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_timing, "PAIR_SECONDS", 4.0)
    monkeypatch.setattr(trial_timing, "SHORT_SECONDS", 0.5)
    trials, said = [trial("ort", 0.5, 0.5), trial("openvino", 9.0, 9.0)], list[str]()
    forms = Forms(graph(), plain=(0.5, 0.5), ort=(0.5, 0.5), openvino=(0.5, 0.5))
    trial_timing.time_trials(
        PLAN, graph(), trials, forms, lambda name, detail: said.append(detail), lambda *_: None
    )
    left = [detail.rpartition(", ")[2] for detail in said if " against " in detail]
    assert left == ["about 79 s left", "about 57 s left"], (
        "eleven pairs of 1 s at two sizes, then three of 9.5 s"
    )


@pytest.mark.usefixtures("given")
@pytest.mark.parametrize(("other", "is_short"), [(0.7, False), (0.8, True), (9.0, True)])
def test_a_trial_far_behind_is_timed_in_a_short_round(
    monkeypatch: pytest.MonkeyPatch, other: float, is_short: bool
) -> None:
    rounds = recorded_rounds(monkeypatch)
    trials = [trial("ort", 0.5, 0.5), trial("openvino", other, other)]
    timed(PLAN, trials, Forms(graph(), plain=(0.5, 0.5), ort=(0.5, 0.5), openvino=(0.5, 0.5)))
    short, full = trial_timing.SHORT_SECONDS, trial_timing.PAIR_SECONDS
    second = short if is_short else full
    assert rounds == [(0.5, full), (0.5, full), (other, second), (other, second)]


class Shifted:
    """A runner whose outputs are off."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value + 0.1 for name, value in self._runner.run(inputs).items()}


def test_a_float_form_is_judged_like_a_trial_before_it_is_named(tmp_path: Path) -> None:
    made = graph()
    floats = FloatReferences(made, tmp_path, module=Net().eval())
    floats._module = None  # the captured program itself is the reference
    plan = PLAN.with_(batches=())
    assert is_faithful(plan, "eager", floats, made)
    floats._runners["float-eager"] = Shifted(floats._runners["float-eager"])
    assert not is_faithful(plan, "eager", floats, made)


@pytest.mark.parametrize(("times", "compared"), [(2.0, False), (1.2, True)])
def test_a_backend_far_behind_a_faithful_one_is_not_compared(
    times: float, compared: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    module = Net().eval()
    made, plan = graph(module), PLAN.with_(quant="none")
    storage.save(made, tmp_path)
    floats = FloatReferences(made, tmp_path / "float", module=module)
    tried = try_backends.Trials(plan, made, Compressed(made, module), tmp_path, floats, Reporter())
    tried.run("ort")
    monkeypatch.setattr(try_backends, "times_behind", lambda *_: times)
    tried.run("eager")
    assert [trial.backend for trial in tried.trials] == ["ort", *["eager"] * compared]
    if not compared:  # as after layers rose, in the same folder
        tried.run("eager")
        assert tried.refused.pop() == tried.refused[0]
    skipped = [(one.name, one.outcome, one.why) for one in tried.refused]
    assert skipped == ([] if compared else [("eager", "skipped", "2.0x the time of ort")])


def test_a_backend_is_behind_by_the_batch_size_where_it_does_best(monkeypatch: pytest.MonkeyPatch) -> None:
    own, rival = Named(3.0, 1.5), Trial("ort", Path(), [], {}, 1, 1, changed=False, runner=Named(1.0, 1.0))
    monkeypatch.setattr(
        trial_timing, "call_of", lambda runner, graph, batch, **_: Call(runner.seconds[batch])
    )
    monkeypatch.setattr(latency, "in_turns", lambda calls, **_: [summarize([float(call)]) for call in calls])
    assert trial_timing.times_behind(own, rival, graph(), PLAN) == 1.5
