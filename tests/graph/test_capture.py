"""Capture keeps names, dtypes and symbolic sizes; what is saved is loaded equal, and no weight is stored twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from infer.errors import NotUsableError, UsageError
from infer.graph import capture, storage
from infer.graph.program import Graph
from infer.spec import TensorSpec


class Tied(nn.Module):
    """Two layers that share a weight, a constant, and a named output."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.second = nn.Linear(16, 16)
        self.second.weight = self.first.weight
        self.register_buffer("shift", torch.arange(16.0), persistent=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        hidden = self.second(self.first(x).relu()) + self.shift
        return {"sum": hidden + y[:, None], "both": torch.cat([hidden, hidden], dim=1)}


SPECS = (TensorSpec.parse("x=float32[batch,16]"), TensorSpec.parse("y=float32[batch]"))


@pytest.fixture(scope="module")
def graph() -> Graph:
    return capture.capture(
        Tied().eval(), SPECS, {"x": torch.randn(3, 16), "y": torch.randn(3)}, sizes={"batch": (1, 64)}
    )


@pytest.mark.parametrize("rows", [1, 2, 63, 64])
def test_the_graph_equals_the_model_at_every_batch(graph: Graph, rows: int) -> None:
    module = graph.program.module()
    x, y = torch.randn(rows, 16), torch.randn(rows)
    expected = module(x=x, y=y)
    got = graph.run({"x": x, "y": y})
    torch.testing.assert_close(got["sum"], expected["sum"])
    assert got["both"].shape == (rows, 32)


def test_outputs_are_named_typed_and_sized(graph: Graph) -> None:
    assert graph.outputs == (
        TensorSpec("sum", "float32", ("batch", 16)),
        TensorSpec("both", "float32", ("batch", 32)),
    )


def test_a_saved_graph_loads_equal(graph: Graph, tmp_path: Path) -> None:
    inputs = {"x": torch.randn(5, 16), "y": torch.randn(5)}
    before = graph.run(inputs)
    storage.save(graph, tmp_path)
    loaded = storage.load(tmp_path)
    assert (loaded.inputs, loaded.outputs, dict(loaded.sizes)) == (
        graph.inputs,
        graph.outputs,
        dict(graph.sizes),
    )
    torch.testing.assert_close(loaded.run(inputs), before, rtol=0, atol=0)
    torch.testing.assert_close(graph.run(inputs), before, rtol=0, atol=0)


def test_a_tied_weight_is_stored_once_and_never_in_the_program(graph: Graph, tmp_path: Path) -> None:
    big = capture.capture(
        nn.Linear(512, 512).eval(),
        (TensorSpec.parse("input=float32[batch,512]"),),
        {"input": torch.randn(2, 512)},
    )
    storage.save(big, tmp_path)
    assert (tmp_path / storage.PROGRAM).stat().st_size < 200_000 < (tmp_path / storage.WEIGHTS).stat().st_size
    (tmp_path / "tied").mkdir()
    storage.save(graph, tmp_path / "tied")
    with safe_open(tmp_path / "tied" / storage.WEIGHTS, "pt") as file:
        assert [n for n in file.keys() if n.endswith("weight")] == ["first.weight"]  # noqa: SIM118
    weights = storage.load_weights(tmp_path / "tied")
    assert weights["first.weight"].data_ptr() == weights["second.weight"].data_ptr()


def test_a_wrong_input_name_lists_the_inputs_of_forward() -> None:
    with pytest.raises(UsageError, match=r"no input named 'image'. Its forward takes: input"):
        capture.capture(
            nn.Linear(4, 4), (TensorSpec.parse("image=float32[batch,4]"),), {"image": torch.randn(2, 4)}
        )


def test_a_model_that_cannot_be_captured_is_refused_with_a_reason(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(NotUsableError, match="can't be captured with inputs x=float32"):
        capture.capture(Branches(), (TensorSpec.parse("x=float32[batch,4]"),), {"x": torch.randn(2, 4)})
    assert capfd.readouterr() == ("", "")  # the graph that torch prints would hide the sentence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_take_and_return_float32(dtype: torch.dtype) -> None:
    model = nn.Linear(16, 4).eval()
    x = torch.randn(2, 16)
    expected = model(x)
    spec = (TensorSpec.parse("input=float32[batch,16]"),)
    graph = capture.capture(capture.in_dtype(model, spec, dtype), spec, {"input": x})
    got = graph.run({"input": x})["output"]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, atol=3e-2, rtol=3e-2)
    assert (got - expected).abs().max() > 0


def test_a_wrong_number_of_outputs_is_refused() -> None:
    with pytest.raises(UsageError, match="expected 1 output names, got 2"):
        capture.capture(
            nn.Linear(4, 4),
            (TensorSpec.parse("input=float32[batch,4]"),),
            {"input": torch.randn(2, 4)},
            outputs=("a", "b"),
        )


@pytest.mark.parametrize("dtype", [torch.complex64, torch.uint16])
def test_an_output_of_a_dtype_that_has_no_name_is_refused(dtype: torch.dtype) -> None:
    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x.to(dtype)

    with pytest.raises(NotUsableError, match=f"output 1 of the model is of dtype {str(dtype)[6:]}") as caught:
        capture.capture(Odd(), (TensorSpec.parse("x=float32[batch,8]"),), {"x": torch.randn(2, 8)})
    assert "float32" in str(caught.value.hint)


@pytest.mark.parametrize("keys", [(1, "1"), ("", "y")])
def test_outputs_without_valid_names_are_numbered(keys: tuple[Any, Any]) -> None:
    class Keys(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[Any, torch.Tensor]:
            return {keys[0]: x, keys[1]: x + 1}

    made = capture.capture(Keys(), (TensorSpec.parse("x=float32[batch,8]"),), {"x": torch.randn(2, 8)})
    assert list(made.run({"x": torch.ones(2, 8)})) == ["output_0", "output_1"]


@pytest.mark.parametrize("other", [3, 2.5, "text", None, True])
def test_outputs_that_are_not_tensors_are_dropped(other: object, tmp_path: Path) -> None:
    class Returns(nn.Module):
        def forward(self, x: torch.Tensor) -> dict[str, object]:
            return {"other": other, "y": x + 1, "rows": x.shape[0]}

    made = capture.capture(Returns(), (TensorSpec.parse("x=float32[batch,8]"),), {"x": torch.randn(2, 8)})
    storage.save(made, tmp_path)
    for graph in (made, storage.load(tmp_path)):
        assert list(graph.run({"x": torch.ones(3, 8)})) == ["y"]


def test_a_stored_program_contains_no_local_paths(tmp_path: Path) -> None:
    graph = capture.capture(
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        (TensorSpec.parse("input=float32[batch,4]"),),
        {"input": torch.randn(3, 4)},
    )
    assert not any("stack_trace" in node.meta for node in graph.program.graph.nodes)
    storage.save(graph, tmp_path)
    stored = (tmp_path / storage.PROGRAM).read_bytes()
    assert b"aten.linear" in stored
    assert b"stack_trace" not in stored
    assert b"site-packages" not in stored
