"""States that a caller carries: outputs of a call that are inputs of the next one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from infer.carried_state import Carrying, states
from infer.spec import TensorSpec


def specs(*names: str) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(name, "float32", ("batch", 4)) for name in names)


@pytest.mark.parametrize(
    ("given", "returned", "pairs"),
    [
        (("x", "state"), ("y", "stateN"), {"state": "stateN"}),
        (("x", "h_0", "c_0"), ("y", "h_n", "c_n"), {"h_0": "h_n", "c_0": "c_n"}),
        (("x", "h0", "c0"), ("y", "hn", "cn"), {"h0": "hn", "c0": "cn"}),
        (("x", "past_conv.0", "past_conv.2"), ("y", "present_conv.2", "present_conv.0"),
         {"past_conv.0": "present_conv.0", "past_conv.2": "present_conv.2"}),
        (("x", "hidden_in"), ("y", "hidden_out", "hidden_new"), {}),
        (("x",), ("y",), {}),
        (("x", "input"), ("output",), {}),
        (("image",), ("image_out",), {}),
        (("sample", "timestep"), ("out_sample",), {}),
        (("x", "enc_buf"), ("y", "enc_buf_out"), {"enc_buf": "enc_buf_out"}),
        (("x", "frames_prev"), ("y", "frames"), {"frames_prev": "frames"}),
    ],
)  # fmt: skip
def test_states_are_paired_by_what_their_names_share(
    given: tuple[str, ...], returned: tuple[str, ...], pairs: dict[str, str]
) -> None:
    assert states(specs(*given), specs(*returned)) == pairs


def test_outputs_of_another_shape_are_no_state() -> None:
    other = (TensorSpec("next_state", "float32", ("batch", 5)),)
    assert states(specs("x", "state"), other) == {}


def test_each_call_is_given_the_state_of_the_call_before() -> None:
    def run(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"y": inputs["state"] + inputs["x"], "next_state": inputs["state"] + inputs["x"]}

    carrying = Carrying(run, {"state": "next_state"})  # type: ignore[arg-type]
    inputs = {"x": torch.ones(1, 4), "state": torch.zeros(1, 4)}
    assert [float(carrying(inputs)["y"].sum()) for _ in range(3)] == [4, 8, 12]
