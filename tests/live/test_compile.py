"""`infer.compile`: the callable answers as the module does, within what was checked, and else the module itself."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from torch import nn

import infer
from infer.errors import GateError, NotUsableError, UsageError
from infer.live.compile import in_python
from infer.live.given_calls import Call
from infer.report.rendering import formatting

QUICK = {"backend": "eager", "allow_slower": True, "batches": (1,)}


@dataclasses.dataclass
class Answer:
    score: torch.Tensor
    parts: dict[str, object]


class Ranker(nn.Module):
    """Dicts in, a dataclass out, rows of any number and of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Linear(8, 16), nn.Linear(4, 16)
        self.drop, self.norm = nn.Dropout(0.5), nn.BatchNorm1d(16)

    def forward(self, batch, *, scale=1.0, mask=None):
        user = self.norm(self.drop(self.user(batch["user"]).relu()))
        item = self.item(batch["item"]["features"])  # [rows, items, 16]
        if mask is not None:
            item = item * mask[..., None]
        return Answer((user[:, None] * item).sum(-1) * scale, {"user": user, "count": 2})


def batch(rows: int, items: int) -> dict[str, object]:
    return {"user": torch.randn(rows, 8), "item": {"features": torch.randn(rows, items, 4)}}


@pytest.fixture(scope="module")
def ranker() -> nn.Module:
    torch.manual_seed(0)
    return Ranker().eval()


@pytest.fixture(scope="module")
def fast(ranker, tmp_path_factory):
    """Two variants: without a mask, of which there are more calls, and with one."""
    torch.manual_seed(1)
    calls = [batch(3, 5), batch(4, 9), batch(2, 6)]
    masked = [Call((batch(2, n),), {"mask": torch.ones(2, n)}) for n in (4, 7)]
    data = [*(Call((row,)) for row in calls), *masked]
    made = infer.compile(ranker, data, output=tmp_path_factory.mktemp("live") / "ranker.infer", **QUICK)
    yield made
    made.close()


def assert_equal(got: Answer, expected: Answer) -> None:
    assert type(got) is type(expected)
    assert got.parts.keys() == expected.parts.keys()
    assert got.parts["count"] == expected.parts["count"]
    torch.testing.assert_close(got.score, expected.score, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.parts["user"], expected.parts["user"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("rows", "items"), [(1, 5), (3, 9), (64, 7), (70, 6)])
def test_answers_have_the_structure_and_the_numbers_of_the_module(fast, ranker, rows, items) -> None:
    fast.misses.clear()
    value = batch(rows, items)
    with torch.no_grad():
        assert_equal(fast(value), ranker(value))
        assert_equal(fast(value, scale=1.0, mask=None), ranker(value))
        assert_equal(fast(batch=value), ranker(value))
    assert not fast.misses


def test_a_mask_is_another_variant(fast, ranker) -> None:
    fast.misses.clear()
    value, mask = batch(5, 6), torch.randint(0, 2, (5, 6)).float()
    with torch.no_grad():
        assert_equal(fast(value, mask=mask), ranker(value, mask=mask))
    assert not fast.misses
    assert len(fast.variants) == 2


def test_calls_beyond_what_was_seen_run_the_module_and_are_counted(fast, ranker) -> None:
    fast.misses.clear()
    longer, doubled = batch(2, 40), batch(2, 5)
    with torch.no_grad():
        assert_equal(fast(longer), ranker(longer))
        assert_equal(fast(doubled, scale=2.0), ranker(doubled, scale=2.0))
    assert fast.misses == {"other sizes or dtypes": 1, "other arguments": 1}


def test_gradients_flow_through_the_module(fast) -> None:
    fast.misses.clear()
    value = batch(2, 5)
    value["user"].requires_grad_(True)
    fast(value).score.sum().backward()
    assert value["user"].grad.abs().sum() > 0
    assert fast.misses == {"gradients": 1}


def test_training_mode_runs_the_module_in_training_mode(fast) -> None:
    fast.misses.clear()
    kept = {name: value.clone() for name, value in fast.original.state_dict().items()}
    try:
        fast.train()
        fast(batch(4, 5))
        assert fast.misses == {"training mode": 1}
    finally:
        fast.eval()
        fast.original.load_state_dict(kept)


def test_arguments_that_the_module_refuses_raise_as_the_module_does(fast) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'colour'"):
        fast(batch(1, 5), colour=1)
    with pytest.raises(TypeError, match="missing 1 required"):
        fast()


def test_the_program_finds_the_attributes_of_the_module(fast, ranker) -> None:
    ranker.config = {"hidden": 16}
    assert fast.config is ranker.config
    assert fast.user is ranker.user
    assert next(fast.parameters()) is next(ranker.parameters())
    with pytest.raises(AttributeError, match="colour"):
        _ = fast.colour


def test_the_report_is_shown_in_terminals_and_notebooks(fast) -> None:
    assert "relative error" in str(fast.report)
    assert "<pre" in fast.report._repr_html_()
    assert "relative error" in fast.report._repr_html_()
    ((path, report), *_) = fast.report.reports
    assert formatting.command(report.plan, "new.infer").startswith(
        "infer.compile(model, data, output='new.infer', "
    )
    assert "backend='eager'" in formatting.repeat_command(report.plan, str(path))


def test_saved_artifacts_open_elsewhere(fast, ranker, tmp_path) -> None:
    first, second = fast.save(tmp_path / "saved.infer")
    assert second.name == "saved-2.infer"
    value = batch(2, 5)
    with infer.Predictor.load(first, trust_code=True) as predictor, torch.no_grad():
        named = {"batch_user": value["user"], "batch_item_features": value["item"]["features"]}
        torch.testing.assert_close(
            predictor.predict(named)["score"], ranker(value).score, rtol=1e-4, atol=1e-5
        )
    with pytest.raises(UsageError, match="exists"):
        fast.save(tmp_path / "saved.infer")


def linear(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 3))


def test_the_module_stays_as_it_was() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Linear(128, 64)).train()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    objects = [id(parameter) for parameter in module.parameters()]
    infer.compile(module, torch.randn(32, 64), quant="int8", max_error=0.1, **QUICK).close()
    assert all(layer.training for layer in module.modules())
    assert [id(parameter) for parameter in module.parameters()] == objects
    assert all(parameter.requires_grad for parameter in module.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in module.state_dict().items())
    assert type(module[0]) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_module_takes_and_returns_its_dtype(dtype) -> None:
    module = linear().eval().to(dtype)
    x = torch.randn(8, 6, dtype=dtype)
    fast = infer.compile(module, x, **QUICK)
    with torch.no_grad():
        expected = module(x)
    got = fast(x)
    assert got.dtype is dtype
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    assert not fast.misses
    fast.close()


def test_a_second_start_takes_the_artifact_of_the_first(monkeypatch) -> None:
    from infer.run import stages

    module, x = linear().eval(), torch.randn(8, 6)
    first = infer.compile(module, x, **QUICK)
    made, optimize = [], stages.optimize
    monkeypatch.setattr(stages, "optimize", lambda *a, **k: (made.append(1), optimize(*a, **k))[1])
    second = infer.compile(linear().eval(), x, **QUICK)
    assert not made
    assert second.variants[0].predictor.path == first.variants[0].predictor.path
    other = infer.compile(linear(seed=1).eval(), x, **QUICK)
    assert made
    with torch.no_grad():
        torch.testing.assert_close(other(x), linear(seed=1).eval()(x))


def test_an_artifact_of_code_that_changed_is_made_again(monkeypatch) -> None:
    """No digest sees a function that forward calls: the check on the user's calls does."""
    module = linear().eval()
    module.register_forward_hook(lambda layer, args, output: output * factor)
    x, factor = torch.randn(8, 6), 1.0
    infer.compile(module, x, **QUICK).close()
    factor = 3.0
    fast = infer.compile(module, x, **QUICK)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), linear().eval()(x) * 3.0)


def test_compiling_works_in_a_thread_under_inference_mode() -> None:
    module, x, made = linear().eval(), torch.randn(8, 6), []

    def run() -> None:
        with torch.inference_mode():
            fast = infer.compile(module, torch.randn(8, 6), **QUICK)
            made.append((fast(x), fast(x + 1.0)))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    with torch.no_grad():
        torch.testing.assert_close(made[0][0], module(x))


def test_without_data_the_first_layer_tells_what_the_module_takes() -> None:
    module = linear().eval()
    fast = infer.compile(module, **QUICK)
    x = torch.randn(5, 6)
    with torch.no_grad():
        torch.testing.assert_close(fast(x), module(x))
    assert not fast.misses


class TwoArguments(nn.Module):
    def forward(self, x, y):
        return x + y


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class Holding(nn.Module):
    def forward(self, x, cache):
        return x + cache.value


class Holder:
    value = 1.0


class Caching(nn.Module):
    def forward(self, x):
        return {"y": x * 2, "cache": Holder()}


class Writing(nn.Module):
    def forward(self, x):
        return x.add_(1.0) * 2


REFUSED = [
    (TwoArguments(), None, {}, UsageError, "the inputs of the model are not known: its forward takes x, y"),
    (lambda x: x, torch.ones(1), {}, UsageError, "expected an nn.Module, got function"),
    (Branching(), torch.ones(2, 3), {}, NotUsableError, "its code asks for the value of a tensor"),
    (Holding(), (torch.ones(2, 3), Holder()), {}, UsageError, "argument cache is of type Holder"),
    (Caching(), torch.ones(2, 3), {}, UsageError, "Caching: output cache is of type Holder"),
    (Writing(), torch.ones(2, 3), {}, NotUsableError, "Writing writes into its argument x"),
    (linear().eval(), torch.ones(2, 6), {"quant": "int9"}, UsageError, "int9"),
    (linear().eval(), torch.ones(2, 6), {"colour": 1}, UsageError, "colour"),
    (nn.Linear(2, 2, device="meta"), torch.ones(2, 2), {}, UsageError, "has no weights"),
]


@pytest.mark.parametrize(("module", "data", "options", "error", "reason"), REFUSED)
def test_a_module_that_can_not_be_compiled_is_refused_with_the_cause(
    module, data, options, error, reason
) -> None:
    with pytest.raises(error, match=reason):
        infer.compile(module, data, **{**QUICK, **options})


class Counting(nn.Module):
    """A module that returns how often it was called: no constant of an artifact."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 4), 0

    def forward(self, x):
        self.calls += 1
        return {"y": self.layer(x), "calls": self.calls}


def test_constants_that_change_from_call_to_call_are_refused() -> None:
    with pytest.raises(GateError, match="other constants, from call to call"):
        infer.compile(Counting().eval(), [torch.randn(4, 3), torch.randn(4, 3)], **QUICK)


IN_PYTHON = [
    ("Use --quant none, or another format", "Use quant none, or another format"),
    ("allow more with --max-error", "allow more with max_error"),
    ("keep it with --allow-slower", "keep it with allow_slower=True"),
    ("--input x=float32[1,3] --batch 4", "inputs x=float32[1,3] batches 4"),
    ("no flag of ours: --colour red", "no flag of ours: --colour red"),
]


@pytest.mark.parametrize(("flags", "arguments"), IN_PYTHON)
def test_errors_name_arguments_where_the_command_line_has_flags(flags, arguments) -> None:
    assert in_python(flags) == arguments


def test_optimize_takes_a_module_a_path_and_a_plan(tmp_path) -> None:
    module, x = linear().eval(), torch.randn(8, 6)
    outcome = infer.optimize(module, tmp_path / "module.infer", data=[x], **QUICK)
    assert outcome.path == tmp_path / "module.infer"
    with infer.Predictor.load(outcome.path, trust_code=True) as predictor, torch.no_grad():
        torch.testing.assert_close(predictor.predict(x), module(x))
    torch.save(module, tmp_path / "module.pt")
    torch.save({"input": x}, tmp_path / "data.pt")
    given = {"data": str(tmp_path / "data.pt"), "trust_code": True, **QUICK}
    from_path = infer.optimize(tmp_path / "module.pt", tmp_path / "path.infer", **given)
    from_plan = infer.optimize(from_path.manifest.plan, str(tmp_path / "plan.infer"))
    assert from_plan.manifest.inputs == from_path.manifest.inputs
    with pytest.raises(UsageError, match="a Plan has all options"):
        infer.optimize(from_path.manifest.plan, tmp_path / "x.infer", quant="int8")
    with pytest.raises(UsageError, match="colour"):
        infer.optimize("model.pt", tmp_path / "x.infer", colour=1)
