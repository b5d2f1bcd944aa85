"""A step that is right in one prefill and wrong in a later call is refused, with the schedule and the token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from backends import eager
from infer.cli import main
from infer.errors import GateError
from infer.fidelity import excess, judge
from infer.fidelity.thresholds import LIMITS, Limits, limits
from infer.fidelity.token_errors import token_errors
from infer.llm.step.attention.paged_attention import use_paged_attention
from infer.llm.step.full_sequence_runner import FullSequenceRunner
from infer.llm.step.paged_step import Step
from infer.llm.step.probe import probe
from infer.llm.step.schedules.schedule_cases import SCHEDULES
from infer.llm.step.schedules.schedule_consistency import (
    compare_schedules,
    judged_windows,
    late_window,
    require_float_step,
)
from infer.llm.step.step_shape import StepShape
from infer.plan import Plan
from infer.results import Metric
from tests.support.tiny_decoders import VOCABULARY, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
IDS = torch.randint(3, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(1))


class FaultyLayer(nn.Module):
    """A feed-forward layer with a fault in front of it."""

    def __init__(self, inner: nn.Module, fault: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.fault = inner, fault

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.fault(x))  # type: ignore[no-any-return]


def short_convolution(x: Tensor) -> Tensor:
    """Each token also sees the two before it, of this call alone."""
    return (
        x
        + 0.1 * nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]
        + 0.1 * nn.functional.pad(x, (0, 0, 2, 0))[:, :-2]
    )


def running_mean(x: Tensor) -> Tensor:
    """Keep a state over all tokens of this call, of whatever sequence."""
    return x + 0.1 * x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


def mean_of_the_call(x: Tensor) -> Tensor:
    return x + 0.1 * x.mean(1, keepdim=True)


def place_in_the_call(x: Tensor) -> Tensor:
    return x * (1 + 0.001 * torch.arange(x.shape[1])[:, None])


def far_convolution(x: Tensor) -> Tensor:
    """Each token also sees the sixteenth before it, farther than a short trial of the model looks."""
    return x + 0.1 * nn.functional.pad(x, (0, 0, 16, 0))[:, :-16]


FAULTS = (far_convolution, short_convolution, running_mean, mean_of_the_call, place_in_the_call)


def plant(model: nn.Module, fault: Callable[[Tensor], Tensor]) -> None:
    layer = model.model.layers[1]
    layer.mlp = FaultyLayer(layer.mlp, fault)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_layer_that_depends_on_the_call_is_refused_in_float(fault: Callable[[Tensor], Tensor]) -> None:
    model = build("llama")
    shape = probe(model)
    plant(model, fault)
    with pytest.raises(
        GateError, match=r"ends of pages differs most from one prefill at position \d+ by"
    ) as e:
        require_float_step(model, shape, IDS)
    assert e.value.exit_code == 4


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_neox", "opt", "mixtral"])
def test_a_correct_decoder_passes_the_schedule_check_in_float(name: str) -> None:
    model = build(name)
    (found,) = require_float_step(model, probe(model), IDS)
    assert isinstance(found.value, float)
    assert found.value < 1e-5


class Runner:
    """The step of a model, uncaptured; `wrong` changes its inputs before each call."""

    def __init__(
        self, model: nn.Module, shape: StepShape, wrong: Callable[[dict[str, Tensor]], None]
    ) -> None:
        self.model, self.step, self.wrong = model, Step(model, shape.page, shape.kv_dtype), wrong

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        given = dict(inputs)
        self.wrong(given)
        with use_paged_attention(self.model), torch.no_grad():
            return {"logits": self.step(**given)}


def pages_in_order(given: dict[str, Tensor]) -> None:
    """Read pages 0, 1, 2 … of whatever sequence, and writes there."""
    table, page = given["block_table"], 32
    given["block_table"] = torch.arange(table.shape[1], dtype=torch.int32).expand_as(table).contiguous()
    given["slot_mapping"] = given["positions"] // page * page + given["positions"] % page


def tables_of_the_first(given: dict[str, Tensor]) -> None:
    given["block_table"] = given["block_table"][:1].expand_as(given["block_table"]).contiguous()


def no_prefix(given: dict[str, Tensor]) -> None:
    """Start a sequence that begins behind two cached pages reads the second for the first."""
    counts = given["query_start"].diff()
    foreign = (given["seq_lens"] - counts == 64) & (counts > 1)
    given["block_table"] = given["block_table"].clone()
    given["block_table"][foreign, 0] = given["block_table"][foreign, -1]


def token_lost(given: dict[str, Tensor]) -> None:
    """Drop the keys of one token near the end are not kept when it is decoded: seven tokens are touched."""
    decoded = given["query_start"].diff() == 1
    lost = (given["positions"] == 64) & decoded.repeat_interleave(given["query_start"].diff().long())
    given["slot_mapping"] = given["slot_mapping"].where(~lost, -1)


def nothing(given: dict[str, Tensor]) -> None: ...


def metrics_of(wrong: Callable[[dict[str, Tensor]], None], **changes: str) -> list[Metric]:
    model = build("llama")
    shape = probe(model, **changes)
    windows = judged_windows(IDS, VOCABULARY, 256)
    stepping = FullSequenceRunner(Runner(model, shape, wrong), shape)
    with torch.no_grad():
        return compare_schedules(stepping, windows, lambda ids: model(input_ids=ids[None]).logits[0])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (pages_in_order, "two sequences of different lengths in one step"),
        (tables_of_the_first, "two sequences of different lengths in one step"),
        (no_prefix, "reading a prefix from cached pages"),
    ],
)
def test_a_runner_that_reads_other_pages_is_refused_in_every_class(
    wrong: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    found = metrics_of(wrong, kv_dtype="float16")
    for allowed in LIMITS.values():
        reason = judge(found, allowed, max_error=100.0)  # no --max-error allows it
        assert f"{words} differs most from one prefill at position" in str(reason)


def angles_end_at_100(given: dict[str, Tensor]) -> None:
    """Turn positions behind the hundredth as if they were the hundredth."""
    given["positions"] = given["positions"].clamp(max=100)


def test_a_fault_at_late_positions_alone_is_refused() -> None:
    model = build("llama")
    shape = probe(model)
    late = late_window(IDS, VOCABULARY, 250, 1000)
    assert late is not None
    assert len(late) == 250

    def logits(ids: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        found = model(input_ids=ids[None]).logits[0]
        return found if rows is None else found[list(rows)]  # type: ignore[no-any-return]

    def compared(wrong: Callable[[dict[str, Tensor]], None]) -> list[Metric]:
        stepping = FullSequenceRunner(Runner(model, shape, wrong), shape)
        with torch.no_grad():
            return compare_schedules(stepping, judged_windows(IDS, VOCABULARY, 250), logits, late=late)

    assert judge(compared(nothing), LIMITS["float32"], None) is None
    reason = judge(compared(angles_end_at_100), LIMITS["float32"], None)
    assert "a long text in chunks differs most from the float model at position" in str(reason)


def test_late_windows_are_as_long_as_seconds_allow() -> None:
    assert late_window(IDS, 49_152, 4096, 135_000_000).shape == (1111,)  # type: ignore[union-attr]
    assert late_window(IDS, 128_256, 4096, 1_200_000_000).shape == (125,)  # type: ignore[union-attr]
    assert late_window(IDS, VOCABULARY, 100, 1000) is None


def test_no_user_budget_loosens_the_schedule_check() -> None:
    found = [Metric("decode", "schedule_error", 0.3, detail="decoding differs at position 3")]
    enough = [Metric("logits", "perplexity_change", 0.0)]
    budget = limits(Plan(source="", quant="int8", max_drop=0.9), "text-generation")
    assert judge(enough, budget, None) is None
    assert "position 3 by 0.3" in str(judge([*found, *enough], budget, None))
    assert excess([*found, *enough], budget, None) == float("inf")
    assert "nothing was measured that --max-drop judges" in str(judge(found[:0], budget, None))


def test_a_single_lost_token_fails_the_schedule_check() -> None:
    found = metrics_of(token_lost)
    by_name = {m.label: m.value for m in found}
    assert judge(found, Limits(relative_error=1.0), None) is None
    assert by_name["schedules.relative_error"] > 0
    assert judge(found, LIMITS["float32"], None) is not None


@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
def test_a_correct_runner_is_equal_on_every_schedule(kv_dtype: str) -> None:
    found = metrics_of(nothing, kv_dtype=kv_dtype)
    errors = {m.subject: m.value for m in found if m.name == "schedule_error"}
    assert errors.keys() == {schedule.name for schedule in SCHEDULES}
    assert max(errors.values()) < LIMITS["float32"].schedule


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    build("llama").save_pretrained(folder)
    return folder


def optimized(source: Path) -> int:
    words = ["optimize", str(source), "--output", str(source.parent / "x.infer"), "--data", "random"]
    return main([*words, "--backend", "eager", "--quant", "int8", "--max-error", "9"])


def test_a_model_with_state_of_its_own_is_refused_with_exit_code_4(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers.models.llama.modeling_llama import LlamaMLP

    forward = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: forward(self, far_convolution(x)))
    assert optimized(llama) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert "decoding across the ends of pages differs most from one prefill at position" in said
    assert not (llama.parent / "x.infer").exists()


def test_a_backend_with_other_decode_outputs_exits_with_4(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = eager.Runner.run

    def wrong(self: eager.Runner, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if len(inputs.get("token_ids", ())) == 1:  # a single layer that is timed has none
            inputs = {**inputs, "positions": inputs["positions"] * 2}
        return run(self, inputs)

    monkeypatch.setattr(eager.Runner, "run", wrong)
    assert optimized(llama) == 4
    said = " ".join(capsys.readouterr().err.split())
    assert (
        "not faithful enough: decoding across the ends of pages differs most from one prefill at position"
        in said
    )


@pytest.mark.parametrize("shape", [(3, 5), (1, 200)])
def test_judged_windows_differ_in_length_and_fit_the_model(shape: tuple[int, int]) -> None:
    ids = torch.randint(0, 9, shape)
    first, second = judged_windows(ids, VOCABULARY, 40)
    assert (len(first), len(second)) == (40, 39)
    assert [len(w) for w in judged_windows(torch.arange(200)[None], 200, 512)] == [72, 45]


def test_short_rows_are_repeated_and_no_other_token_is_judged() -> None:
    ids = torch.randint(5, 20, (4, 8))
    windows = judged_windows(ids, VOCABULARY, 256)
    assert [len(w) for w in windows] == [72, 45]
    assert set(torch.cat(windows).tolist()) <= set(ids.flatten().tolist())


@pytest.mark.parametrize("hidden", [-torch.inf, -1e9, torch.nan])
def test_the_error_of_a_token_does_not_depend_on_what_other_tokens_hide(hidden: float) -> None:
    expected = torch.randn(4, 320)
    got = expected + 0.1 * torch.randn(4, 320)
    alone = token_errors(expected, got)
    for side in (expected, got):
        side[2, 5] = hidden
    assert torch.equal(token_errors(expected, got)[[0, 1, 3]], alone[[0, 1, 3]])
    assert token_errors(expected[:0], got[:0]).shape == (0,)


def test_token_errors_ignore_softmax_shifts_and_find_non_finite_logits() -> None:
    rows = torch.randn(3, 8)
    assert token_errors(rows, rows + 7).max() < 1e-6
    hidden = rows.clone()
    hidden[0, 0] = -torch.inf
    assert token_errors(hidden, hidden).tolist() == [0, 0, 0]
    assert token_errors(hidden, rows).isinf().tolist() == [True, False, False]
    assert token_errors(rows, rows.where(rows != rows[1, 1], torch.nan)).isinf().tolist() == [
        False,
        True,
        False,
    ]
