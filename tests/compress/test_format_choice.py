"""Pins, measured dispatch, budgets and rising, on a model in memory; times are given, never taken."""

from __future__ import annotations

import copy
import hashlib
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from backends.ort import integer_or_float
from infer import latency, plugins
from infer.compress import assign, resolve_pins
from infer.compress.assign import layer_calls, layer_timing, lowered_layers, sensitivity
from infer.compress.assign.budget import for_drop
from infer.compress.assign.format_order import larger_formats
from infer.compress.assign.sensitivity import LayerSensitivity
from infer.device import processors as other_load
from infer.errors import GateError, NotUsableError, UsageError
from infer.fidelity import Comparison, drop, excess
from infer.fidelity.thresholds import LIMITS, Limits
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.spec import Finding, TensorSpec


@pytest.fixture(autouse=True)
def own_timings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each test its own timing cache; compiled kernels stay in the shared folder."""
    monkeypatch.setattr(layer_timing, "paths", SimpleNamespace(cache=lambda name: tmp_path))


@pytest.fixture(scope="module")
def known() -> dict[str, sensitivity.Sensitivity]:
    return {}


@pytest.fixture(autouse=True)
def measured_once(known: dict[str, sensitivity.Sensitivity], monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure equal weights in equal formats once: most of these tests differ in the budget alone."""
    measure = sensitivity.measure

    def remembered(
        model: nn.Module, candidates: Any, formats: Any, samples: dict[str, Tensor], **options: Any
    ) -> sensitivity.Sensitivity:
        key = hashlib.sha256(repr(sorted(formats.items())).encode())
        for tensor in (*model.state_dict().values(), *samples.values()):
            key.update(tensor.numpy().tobytes())
        if key.hexdigest() not in known:
            known[key.hexdigest()] = measure(model, candidates, formats, samples, **options)
        return copy.deepcopy(known[key.hexdigest()])

    monkeypatch.setattr(sensitivity, "measure", remembered)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 64)
        self.small = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.small(self.third(self.second(self.first(x).relu()).relu()))


class FindingsReporter(Reporter):
    def of(self, what: str) -> Finding:
        return next(f for f in self.findings if f.what == what)


def assignment(
    times: dict[tuple[str, str], float] | None = None, calibrated: bool = True, **asked: object
) -> assign.Assignment:
    """Build an assignment; `times` maps (format, layer) to time over float, without it layers are not timed."""
    asked = {"quant": "nf4", "allow_slower": times is None, **asked}
    plan = Plan(source="x", backend="eager", dtype="float32", batches=(1, 4), **asked)
    model, x = Net().eval(), torch.randn(12, 64)
    real = assign.CalibrationSet(
        model, (TensorSpec("x", "float32", ("batch", 64)),), ("y",), "tensors", {"x": x},
        {"x": torch.randn(6, 64)} if calibrated else {},
    )  # fmt: skip
    names = {id(module): name for name, module in model.named_modules()}

    def time(small: nn.Module, layer: nn.Module, x: Tensor) -> layer_timing.LayerTime:
        ratio = (times or {}).get((small.packed.format, names[id(layer)]), 0.5)
        return layer_timing.LayerTime(1e-3 * ratio, 1e-3, ratio, ratio * 0.99, ratio * 1.01)

    reporter = FindingsReporter()
    return assign.Assignment(plan, real, reporter, assign.collect_statistics(plan, real, reporter), time=time)


def decided(made: assign.Assignment) -> dict[str, str]:
    assign.decide(made)
    return made.now()


def test_every_layer_gets_the_requested_format_by_default() -> None:
    assert decided(assignment()) == {"first": "nf4", "second": "nf4", "third": "nf4"}


def test_a_pin_is_exact_or_a_glob_and_the_exact_one_wins() -> None:
    made = assignment(layers={"first": "int8", "*ir*": "float"})
    assert decided(made) == {"first": "int8", "second": "nf4", "third": "float"}
    names = ["a.q", "a.k", "b.q"]
    assert resolve_pins({"*.q": "nf4", "b.*": "int8", "a.k": "float"}, names) == {
        "a.q": "nf4", "b.q": "int8", "a.k": "float",
    }  # fmt: skip


def test_a_pin_that_names_no_layer_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(UsageError, match="no layer named 'frist'.*Known: first.*Did you mean 'first'"):
        assign.decide(assignment(layers={"frist": "int8"}))


def test_a_slow_layer_takes_int8_and_stays_float_if_that_is_slow_too() -> None:
    made = assignment(
        {
            ("nf4", "first"): 1.8, ("nf4", "second"): 2.3, ("int8", "second"): 1.2, ("fp16", "second"): 1.3,
            ("nf4", "third"): 1.0,
        }
    )  # fmt: skip
    assert decided(made) == {"first": "int8", "second": "float", "third": "nf4"}
    assert made.reporter.of("first").value == "int8"
    assert "nf4 takes 1.80x of float at" in made.reporter.of("first").why
    assert "int8 takes 1.20x" in made.reporter.of("second").why


def test_a_slow_weight_only_layer_stays_if_the_model_is_faster() -> None:
    made = assignment({("nf4", "first"): 1.6})
    assert set(decided(made).values()) == {"nf4"}
    said = made.reporter.of("layers together").why
    assert "0.87x of float at batch 1, 0.87x of float at batch 4" in said
    assert "slower alone, kept for the memory: first" in said


def test_a_slow_int8_layer_stays_float_in_a_fast_model() -> None:
    slow = {("int8", "first"): 1.1, ("fp16", "first"): 1.1}
    assert decided(assignment(slow, quant="int8"))["first"] == "float"


def test_only_as_many_layers_leave_a_weight_only_format_as_the_whole_needs() -> None:
    slow = {("nf4", "first"): 1.3, ("nf4", "second"): 1.5, ("nf4", "third"): 1.1}
    assert decided(assignment(slow)) == {"first": "nf4", "second": "int8", "third": "nf4"}


def test_a_negligible_slowdown_keeps_the_format() -> None:
    assert decided(assignment({("nf4", "first"): 1.02}))["first"] == "nf4"


def test_pinned_layers_are_not_timed() -> None:
    made = assignment({("nf4", "first"): 9.0}, layers={"first": "nf4"})
    assert decided(made)["first"] == "nf4"


def test_a_model_whose_layers_are_all_slower_is_refused() -> None:
    slow = {
        (format, name): 2.0 for format in ("nf4", "int8", "fp16") for name in ("first", "second", "third")
    }
    with pytest.raises(
        GateError, match=r"refused, slower: no layer .* first: nf4 takes 2.00x.*--allow-slower"
    ):
        assign.decide(assignment(slow))


def test_timings_are_kept_for_the_next_run_of_this_machine() -> None:
    decided(assignment({("nf4", "second"): 3.5}))
    second = assignment({("nf4", "second"): 0.1})
    assert decided(second)["second"] == "int8", "what was measured before counts"
    assert "0 timed now" in second.reporter.of("layer timings").why


def pair_of(ours: list[float], floats: list[float]) -> latency.Paired:
    ratios = [a / b for a, b in zip(ours, floats, strict=True)]
    return latency.Paired(
        *latency.decide(ratios), len(ratios), latency.summarize(ours), latency.summarize(floats)
    )


def test_a_layer_that_other_processes_hold_up_counts_by_its_shortest_calls() -> None:
    stalled = [9.5e-3] * 9 + [1.1e-3] * 2  # a team of threads, one of which waits for its processor
    assert pair_of(stalled, [1e-3] * 11).low > 9
    time = layer_timing.LayerTime.of(pair_of(stalled, [1e-3] * 11))
    assert (time.seconds, time.float_seconds, time.ratio) == (1.1e-3, 1e-3, pytest.approx(1.1))
    assert not layer_timing.LayerTime.of(pair_of([9.5e-3] * 9 + [1e-3] * 2, [1e-3] * 11)).loses
    assert not layer_timing.LayerTime.of(pair_of([1e-3] * 11, [4e-3] * 8 + [1e-3] * 3)).ratio < 1


def test_a_layer_that_is_slow_in_every_call_loses_by_its_medians() -> None:
    pair = pair_of([1.5e-3] * 10 + [1.0e-3], [1e-3] * 11)
    time = layer_timing.LayerTime.of(pair)
    assert time.loses
    assert (time.seconds, time.ratio, time.low) == (1.5e-3, 1.5, pair.low)


def test_a_damaged_cache_of_timings_is_measured_again() -> None:
    made = assignment({("nf4", "second"): 0.5})
    path = layer_timing.LayerTimer(made.plan).path
    path.write_text("{half")
    assert decided(made)["second"] == "nf4"
    assert "0 known from before" in made.reporter.of("layer timings").why


def bits(made: assign.Assignment) -> float:
    found = made.now()
    weights = made.candidates.weights
    size = sum(
        w.tensor.numel() * 4
        if found[w.name] == "float"
        else made.candidates.packing(w, found[w.name]).num_bytes
        for w in weights
    )
    return size * 8 / sum(w.tensor.numel() for w in weights)


@pytest.mark.parametrize("asked", [4.4, 5.0, 6.5, 8.3, 20.0])
def test_stored_bits_stay_within_the_budget_of_bits(asked: float) -> None:
    made = assignment(bits=asked, quant="cluster:3")
    decided(made)
    assert bits(made) <= asked
    assert made.reporter.of("mean bits").value == pytest.approx(bits(made), abs=1e-4)


def test_more_bits_never_have_more_effect() -> None:
    sums = []
    for asked in (4.0, 4.5, 6.0, 9.0):
        torch.manual_seed(0)
        made = assignment(bits=asked, quant="cluster:3")
        now = decided(made)
        sums.append(sum(layer.effect[now[layer.name]] for layer in made.measured.layers))
    assert sums == sorted(sums, reverse=True)


def test_an_unreachable_bit_budget_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"--bits 3 is too few: .* take 4\.\d+ bits.*Give --bits 4"):
        assign.decide(assignment(bits=3.0))


def test_pinned_layers_count_in_the_mean() -> None:
    made = assignment(bits=6.0, quant="cluster:3", layers={"third": "int8"})
    assert decided(made)["third"] == "int8"
    assert bits(made) <= 6.0


def test_a_budget_takes_no_format_that_is_slower_here() -> None:
    made = assignment({("cluster:3", "first"): 2.0, ("nf4", "first"): 2.0}, quant="cluster:3", bits=5.5)
    assert decided(made)["first"] not in ("cluster:3", "nf4")


def test_a_drop_budget_gives_the_smallest_model_within_it() -> None:
    made = assignment(max_drop=0.08, quant="cluster:3")
    now = decided(made)
    assert made.drop_together(now) <= 0.08
    assert bits(made) < 8


def test_a_search_for_drop_counts_only_what_was_measured() -> None:
    layers = [
        LayerSensitivity(str(i), (str(i),), 100, {"a": 50, "float": 400}, {"a": 1.0, "float": 0.0})
        for i in range(8)
    ]
    asked: list[int] = []

    def measured(formats: dict[str, str]) -> float:
        asked.append(sum(f == "a" for f in formats.values()))
        return 0.1 * asked[-1]

    best, tried = for_drop(layers, 0.35, measured)
    assert sum(f == "a" for f in best.formats.values()) == 3
    assert len(tried) == len(asked) <= 8
    best, _ = for_drop(layers, 0.0, lambda formats: 1.0)
    assert set(best.formats.values()) == {"float"}, "when nothing holds, the largest"


def test_a_budget_needs_rows_apart_from_the_evaluation_rows() -> None:
    with pytest.raises(UsageError, match=r"no rows to calibrate with: the 12 given judge the result.*--data"):
        assign.decide(assignment(calibrated=False, bits=5.0))


def test_a_budget_needs_the_float_model_in_memory() -> None:
    made = assignment(bits=5.0)
    made.calibration_set.model = None
    with pytest.raises(NotUsableError, match="weights are in memory.*--bits"):
        assign.decide(made)


def compared(made: assign.Assignment) -> list[Metric]:
    comparison, x = Comparison("tensors"), made.calibration_set.samples["x"]
    with torch.no_grad():
        want = made.model(x)
        with made.candidates.in_place(made.now()):
            comparison.add({"y": want}, {"y": made.model(x)})
    return comparison.metrics()


def test_the_most_sensitive_layers_rise_until_the_gate_passes() -> None:
    torch.manual_seed(0)
    before = next(f.value for f in compared(assignment(quant="cluster:3")) if f.label == "y.relative_error")
    torch.manual_seed(0)
    made = assignment(quant="cluster:3", max_error=0.85 * before)
    decided(made)
    rounds = 0
    while excess(compared(made), LIMITS["3bit"], made.plan.max_error) > 1:
        assert assign.raise_formats(made, compared(made)) == ""
        rounds += 1
    assert 1 <= rounds <= 4
    rose = [f for f in made.reporter.findings if f.what.startswith("rises ")]
    assert rose
    assert all(f.value in ("int8", "fp16", "float") and "→" in f.why for f in rose)
    assert "cluster:3" in made.now().values()


def test_layers_are_not_raised_when_little_of_the_format_would_stay() -> None:
    made = assignment(quant="cluster:2", max_error=1e-4)
    decided(made)
    assert "times the bytes of cluster:2" in assign.raise_formats(made, compared(made))
    assert set(made.now().values()) == {"cluster:2"}


def test_int8_layers_take_16_bits_where_the_bytes_of_float_are_too_many() -> None:
    made = assignment(quant="int8", max_error=1e-4)
    decided(made)
    assert assign.raise_formats(made, compared(made)) == ""
    assert set(made.now().values()) == {"fp16"}


def test_layers_that_are_slow_in_16_bits_become_float_instead() -> None:
    slow = {("fp16", name): 2.0 for name in ("first", "second", "third")}
    made = assignment(slow, quant="int8", max_error=6e-3)
    decided(made)
    assert assign.raise_formats(made, compared(made)) == ""
    assert set(made.now().values()) == {"int8", "float"}


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"bits": 4.5}, "--bits 4.5 leaves no room"),
        ({"layers": {"*": "cluster:3"}}, "every layer is pinned"),
        ({"calibrated": False}, "no rows beside those that judge"),
    ],
)
def test_the_reason_against_a_fallback_is_reported(asked: dict, why: str) -> None:
    made = assignment(quant="cluster:3", **asked)
    decided(made)
    assert why in str(assign.raise_formats(made, [Metric("y", "relative_error", 0.9)]))


def test_a_wrong_output_shape_raises_no_layer() -> None:
    made = assignment()
    decided(made)
    assert assign.raise_formats(made, [Metric("y", "shape", False)]) == "raising layers can't cure it"


def test_the_quality_drop_is_measured_by_the_metric_of_the_task() -> None:
    findings = [Metric("y", w, v) for w, v in
                (("relative_error", 0.2), ("top1", 0.97), ("perplexity_change", 0.01))]  # fmt: skip
    assert drop(findings, "text-generation") == 0.01
    assert drop(findings, "classification") == pytest.approx(0.03)
    assert drop(findings, "embedding") == 0.2
    assert drop(findings[:1], "text-generation") == float("inf")


def test_excess_over_a_limit_is_relative_to_the_limit() -> None:
    limits = Limits(relative_error=0.1, kl=0.01, top1=0.9)
    assert excess([Metric("y", "kl", 0.02)], limits, None) == pytest.approx(2)
    assert excess([Metric("y", "relative_error", 0.2)], limits, None) == pytest.approx(4)
    assert excess([Metric("y", "top1", 0.7)], limits, None) == pytest.approx(9)
    assert excess([Metric("y", "non_finite", 3)], limits, None) == float("inf")
    assert excess([Metric("y", "kl", 0.02)], limits, max_error=0.5) == 0


def test_a_layer_is_timed_as_the_backend_runs_it_and_the_timing_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_timing, "MOST_MISSING", float("inf"))  # whatever else runs
    made = assignment()
    plan = made.plan.with_(backend="inductor", device="cpu")
    clock = layer_timing.LayerTimer(plan, folder=tmp_path)
    assert clock.backend == "eager"
    weight = next(w for w in made.candidates.weights if w.name == "first")
    timed = clock.timed(made.candidates, weight, "int8", (3, 64))
    assert min(timed.seconds, timed.float_seconds) > 0
    assert timed.low <= timed.ratio <= timed.high
    clock.save()
    clock.close()
    again = layer_timing.LayerTimer(plan, folder=tmp_path)
    assert again.timed(made.candidates, weight, "int8", (3, 64)) == timed
    assert again.num_measured == 0
    assert layer_timing.LayerTimer(plan.with_(backend="ort"), folder=tmp_path).path != clock.path


def test_a_timing_that_waited_for_the_processor_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def paired_asleep(*_: object, **__: object) -> latency.Paired:
        sleep(0.05)
        return pair_of([0.02] * 9, [1e-4] * 9)

    monkeypatch.setattr(layer_timing.latency, "paired", paired_asleep)
    made = assignment()
    for _ in range(2):
        clock = layer_timing.LayerTimer(made.plan.with_(backend="eager", device="cpu"), folder=tmp_path)
        for weight in made.candidates.weights[:1] * 2:
            assert clock.timed(made.candidates, weight, "int8", (1, 64)).ratio == pytest.approx(200)
        assert clock.num_measured == 1, "known within a run, not from run to run"
        clock.save()
        clock.close()


def test_a_timing_beside_other_processes_is_made_again_with_one_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call of a team waits for the thread whose processor another process has; a single thread waits for none."""
    threads = list[int]()

    def paired(*_: object, **__: object) -> latency.Paired:
        threads.append(torch.get_num_threads())
        return pair_of([0.02 if threads[-1] > 1 else 5e-5] * 9, [1e-4] * 9)

    class Busy:
        def excess(self, team: int) -> float:
            return 0.9 * (team > 1)

    monkeypatch.setattr(layer_timing.latency, "paired", paired)
    monkeypatch.setattr(layer_timing, "OtherLoad", Busy)
    made, before = assignment(), torch.get_num_threads()
    clock = layer_timing.LayerTimer(made.plan.with_(backend="eager", device="cpu"), folder=tmp_path)
    try:
        torch.set_num_threads(2)
        timed = clock.timed(made.candidates, made.candidates.weights[0], "int8", (1, 64))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert threads == [2, 1]
    assert timed.ratio == pytest.approx(0.5)
    clock.save()
    clock.close()
    again = layer_timing.LayerTimer(made.plan.with_(backend="eager", device="cpu"), folder=tmp_path)
    again.timed(made.candidates, made.candidates.weights[0], "int8", (1, 64))
    assert again.num_measured == 1, "a timing beside other processes was kept"
    again.close()


@pytest.mark.parametrize(
    ("processors", "threads", "busy", "own", "missing"),
    [
        (2, 2, 2.0, 1.0, 1.0),
        (2, 2, 2.0, 2.0, 0.0),
        (4, 2, 3.0, 2.0, 0.0),
        (4, 4, 4.0, 3.0, 1.0),
        (2, 1, 0.1, 0.1, 0.9),
    ],
    ids=["one for others", "all ours", "one to spare", "none to spare", "not run"],
)
def test_missing_processors_are_those_of_others_beyond_the_spare_ones(
    monkeypatch: pytest.MonkeyPatch, processors: int, threads: int, busy: float, own: float, missing: float
) -> None:
    looks = iter([(0.0, 0.0, 0.0), (1.0, own, busy)])
    now: list[tuple[float, float, float]] = []

    def look() -> float:
        now[:] = [next(looks)]
        return now[0][0]

    monkeypatch.setattr(other_load, "_allowed", lambda: list(range(processors)))
    monkeypatch.setattr(other_load.time, "perf_counter", look)
    monkeypatch.setattr(other_load.time, "process_time", lambda: now[0][1])
    one = lambda: SimpleNamespace(user=now[0][2] / processors, idle=7.0, iowait=3.0)  # noqa: E731
    monkeypatch.setattr(other_load.psutil, "cpu_times", lambda percpu: [one() for _ in range(processors)])
    assert other_load.OtherLoad().excess(threads) == pytest.approx(missing, abs=2 * other_load.TICKS)


def test_layers_are_lowered_once_for_all_rows_and_float_once_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = []
    capture = lowered_layers.capture.capture
    monkeypatch.setattr(
        lowered_layers.capture,
        "capture",
        lambda module, *given, **options: captured.append(module.layer) or capture(module, *given, **options),
    )
    made = assignment()
    clock = layer_timing.LayerTimer(made.plan.with_(backend="eager", device="cpu"), folder=tmp_path)
    weight = next(w for w in made.candidates.weights if w.name == "first")
    for format in ("int8", "nf4"):
        for rows in (3, 1, 70):
            assert clock.timed(made.candidates, weight, format, (rows, 64)).seconds > 0
    clock.close()
    assert clock.num_measured == 6
    assert [layer is made.model.first for layer in captured] == [False, True, False]


def test_least_recently_timed_layers_are_closed(tmp_path: Path) -> None:
    plan = assignment().plan.with_(backend="eager", device="cpu")
    lowered = lowered_layers.LoweredLayers(plan, "eager")
    first = lowered.runner("0", nn.Linear(8, 8), torch.randn(2, 8))
    for name in range(1, lowered_layers.KEPT + 1):
        lowered.runner(str(name), nn.Linear(8, 8), torch.randn(2, 8))
    assert lowered.runner(str(name), nn.Linear(8, 8), torch.randn(2, 8)) is not first
    with pytest.raises(AttributeError):
        first.run({"x": torch.randn(2, 8)})
    lowered.close()


def test_a_changed_kernel_is_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "cpu" / "src" / "linear.cpp"
    source.parent.mkdir(parents=True)
    monkeypatch.setattr(layer_timing.kernels, "__file__", str(tmp_path / "__init__.py"))
    paths = set()
    for text in ("// one", "// another"):
        source.write_text(text)
        paths.add(layer_timing.LayerTimer(Plan(source="x", device="cpu"), folder=tmp_path).path)
    assert len(paths) == 2


def test_shapes_are_those_that_layers_get_at_the_batch_sizes_of_the_plan() -> None:
    made = assignment()
    layers = [made.model.first, made.model.third]
    seen = layer_calls.count_calls(made.model, layers, [made.calibration_set.call(rows) for rows in (1, 4)])
    assert seen == {
        id(layers[0]): [{(1, 64): 1}, {(4, 64): 1}],
        id(layers[1]): [{(1, 128): 1}, {(4, 128): 1}],
    }


def test_calls_are_counted_in_one_run_for_all_layers_and_formats() -> None:
    made, runs = assignment(), list[int]()
    layers = [made.model.first, made.model.third]
    counter = layer_calls.CallCounter()

    def call(rows: int) -> dict[str, Tensor]:
        runs.append(rows)
        return made.calibration_set.call(rows)

    expected = layer_calls.count_calls(made.model, layers, [made.calibration_set.call(n) for n in (1, 4)])
    assert counter.count(made.model, layers, (1, 4), call) == expected
    assert counter.count(made.model, layers[1:], (4,), call) == {id(layers[1]): [{(4, 128): 1}]}
    assert runs == [1, 4]
    unused = nn.Linear(64, 64)
    assert counter.count(made.model, [layers[0], unused], (1,), call) == {id(layers[0]): [{(1, 64): 1}]}
    assert runs == [1, 4, 1], "a layer that the model did not have then"


class Decoder(nn.Module):
    """Token ids [batch, tokens] → logits of all of them; each block is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.block, self.head = nn.Embedding(16, 64), nn.Linear(64, 64), nn.Linear(64, 128)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return self.head(self.block(self.block(x).relu()))


def decoder(
    times: dict[str, dict[int, float]], quant: str = "int8:weight", **asked: object
) -> assign.Assignment:
    """Build a decoder's assignment; `times` maps layer → rows → time over float (default 0.3).

    One row takes 1 ms, each further one 0.1 ms.
    """
    plan = Plan(source="x", backend="eager", dtype="float32", batches=(1, 8), quant=quant, **asked)
    model, ids = Decoder().eval(), torch.zeros(8, 128, dtype=torch.int64)
    real = assign.CalibrationSet(
        model, (TensorSpec("ids", "int64", ("batch", "seq")),), ("logits",), "text-generation", {"ids": ids}, {},
        steps=True, head=model.head,
    )  # fmt: skip
    names = {id(module): name for name, module in model.named_modules()}

    def time(small: nn.Module, layer: nn.Module, x: Tensor) -> layer_timing.LayerTime:
        ratio, floats = times.get(names[id(layer)], {}).get(len(x), 0.3), 1e-3 + 1e-4 * len(x)
        return layer_timing.LayerTime(floats * ratio, floats, ratio, ratio * 0.99, ratio * 1.01)

    reporter = FindingsReporter()
    return assign.Assignment(plan, real, reporter, assign.collect_statistics(plan, real, reporter), time=time)


def test_layers_of_a_language_model_are_timed_at_the_rows_of_its_steps() -> None:
    made = decoder({})
    layers = [made.model.block, made.model.head]
    seen = layer_calls.count_step_calls(
        made.model, layers, made.calibration_set.call(1), made.model.head, (1, 8)
    )
    assert seen[id(layers[0])] == [{(1, 64): 256, (256, 64): 2}, {(8, 64): 256, (256, 64): 16}]
    assert seen[id(layers[1])] == [{(1, 64): 129}, {(8, 64): 129}], "the head computes last tokens only"


@pytest.mark.parametrize("quant", ["int8:weight", "nf4", "int8"])
def test_a_model_slower_only_at_prefill_keeps_its_format(quant: str) -> None:
    """A head that takes 1.6x of float at 1024 rows never sees them, and answers outweigh prompts."""
    made = decoder({"head": {1024: 1.6, 256: 1.6}, "block": {256: 1.5, 1024: 1.5}}, quant)
    assert decided(made)["block"] == quant
    assert decided(made)["head"] == quant


def test_a_language_model_slow_at_decoding_is_refused_with_the_workload() -> None:
    slow = {name: {1: 1.4, 8: 1.4, 256: 1.4} for name in ("head", "block")}
    with pytest.raises(GateError, match="over a prompt of 256 tokens and an answer of 128 at batch"):
        assign.decide(decoder(slow))


@pytest.mark.parametrize(
    ("quant", "larger"),
    [
        ("nf4", ["nf4:16", "cluster:6", "int8", "fp16"]),
        ("nf4:16", ["cluster:6", "int8", "fp16"]),
        ("int4", ["nf4:16", "cluster:6", "int8", "fp16"]),
        ("int4:16", ["cluster:6", "int8", "fp16"]),
        ("cluster", ["nf4:16", "cluster:6", "int8", "fp16"]),
        ("cluster:4", ["nf4:16", "cluster:6", "int8", "fp16"]),
        ("int8", ["fp16"]),
    ],
)
def test_larger_formats_are_in_order_of_bits(quant: str, larger: list[str]) -> None:
    assert larger_formats(Plan(source="x", quant=quant)) == [quant, *larger]


@pytest.mark.parametrize("backend", ["ort", pytest.param("openvino", marks=pytest.mark.openvino)])
def test_formats_of_one_form_share_a_time(backend: str, tmp_path: Path) -> None:
    made = assignment()
    clock = layer_timing.LayerTimer(made.plan.with_(backend=backend, device="cpu"), folder=tmp_path)
    weight = next(w for w in made.candidates.weights if w.name == "first")
    assert clock.timed(made.candidates, weight, "nf4", (3, 64)) is clock.timed(
        made.candidates, weight, "cluster", (3, 64)
    )
    clock.timed(made.candidates, weight, "int8", (3, 64))
    clock.close()
    assert clock.num_measured == 2


@pytest.mark.parametrize("backend", ["ort", pytest.param("openvino", marks=pytest.mark.openvino)])
def test_layers_of_one_form_run_the_same_operators(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made, module = assignment(), plugins.get("backends", backend)
    monkeypatch.setattr(integer_or_float, "_compare", lambda *_: (True, Finding("", "", 0)))
    weight = next(w for w in made.candidates.weights if w.name == "first")
    ran: dict[str, list[set[tuple[str, object, str]]]] = {}
    for format in ("nf4", "nf4:16", "cluster", "cluster:3"):
        form = module.layer_form(made.candidates.packing(weight, format).tensors)
        findings: list[Finding] = []
        monkeypatch.setattr(module, "Lowered", lambda found, *rest, all=findings: all.extend(found))
        lowered = lowered_layers.LoweredLayers(made.plan.with_(quant=format, device="cpu"), backend)
        with made.candidates.single(weight, made.model.first, format) as small:
            lowered.runner(format, small, torch.randn(3, 64))
        lowered.close()
        told = {(one.what, one.value, one.why) for one in findings if "layers" in one.what}
        ran.setdefault(form.name, []).append(told)
    assert [len(group) for group in ran.values()] == [3, 1]
    assert all(told == group[0] for group in ran.values() for told in group)
    assert all(told for group in ran.values() for told in group)


@pytest.mark.parametrize(
    ("format", "form"), [("int8", "int8 by scale"), ("int8:weight", "int8 by weight_scale"), ("int4", None)]
)
def test_other_formats_have_a_time_of_their_own(format: str, form: str | None) -> None:
    made = assignment(quant=format)
    weight = next(w for w in made.candidates.weights if w.name == "first")
    for backend in ("ort", "openvino"):
        found = plugins.get("backends", backend).layer_form(made.candidates.packing(weight, format).tensors)
        assert (found and found.name) == (form if backend == "ort" else None)
