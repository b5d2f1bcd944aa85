"""Inputs of a timed call: rows of typical lengths without common padding, and the operations that they need."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from infer import fidelity
from infer.graph.program import TorchGraph
from infer.graph.typical_inputs import cut, row_lengths, timed_lengths, typical_inputs
from infer.report.measurements import roofline
from infer.run import run_trial
from infer.run.remembered_outputs import RememberedOutputs
from infer.spec import TensorSpec

WIDTH = 8
SPECS = (
    TensorSpec("input_ids", "int64", ("batch", "seq")),
    TensorSpec("attention_mask", "int64", ("batch", "seq")),
)
SIZES = {"batch": (1, 64), "seq": (2, 64)}


def padded(*lengths: int, width: int = 32) -> dict[str, Tensor]:
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    return {"input_ids": torch.arange(len(lengths) * width).reshape(-1, width) * mask, "attention_mask": mask}


class Encoder(nn.Module):
    """One linear layer on each token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(4096, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return (self.linear(self.embedding(input_ids)) * attention_mask[..., None]).sum(1)


def encoder(samples: dict[str, Tensor], *, fixed: bool = False) -> TorchGraph:
    batch, seq = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("seq", min=2, max=64)
    dims = {0: batch} if fixed else {0: batch, 1: seq}
    example = {name: value[:1].repeat(2, 1) for name, value in samples.items()}
    program = torch.export.export(
        Encoder().requires_grad_(False), (), example, dynamic_shapes=dict.fromkeys(example, dims)
    )
    length = samples["attention_mask"].shape[1] if fixed else "seq"
    specs = tuple(TensorSpec(spec.name, spec.dtype, ("batch", length)) for spec in SPECS)
    outputs = (TensorSpec("output", "float32", ("batch", WIDTH)),)
    sizes = {"batch": (1, 64)} if fixed else SIZES
    return TorchGraph(inputs=specs, outputs=outputs, samples=samples, sizes=sizes, program=program)


def test_one_row_is_the_median_and_has_no_padding() -> None:
    inputs = typical_inputs(SPECS, padded(3, 30, 9, 5, 20), SIZES, 1)
    assert inputs["attention_mask"].tolist() == [[1] * 9]
    assert torch.equal(inputs["input_ids"], padded(3, 30, 9, 5, 20)["input_ids"][2:3, :9])


def test_a_batch_has_the_quantiles_of_all_lengths() -> None:
    lengths = list(range(2, 32))
    found = timed_lengths(SPECS, padded(*lengths), SIZES, 5)
    assert found is not None
    assert found.tolist() == [5, 11, 17, 23, 29]


def test_a_batch_larger_than_the_samples_repeats_rows() -> None:
    inputs = typical_inputs(SPECS, padded(4, 7), SIZES, 5)
    assert row_lengths(inputs["attention_mask"]).tolist() == [4, 4, 7, 7, 7]
    assert inputs["input_ids"].shape == (5, 7)


def test_a_row_without_tokens_counts_as_one() -> None:
    assert row_lengths(padded(0, 3)["attention_mask"]).tolist() == [1, 3]
    assert typical_inputs(SPECS, padded(0), SIZES, 1)["input_ids"].shape == (1, 2)  # the smallest size


def test_padding_on_the_left_stays() -> None:
    samples = {name: value.flip(1) for name, value in padded(3, 5, width=8).items()}
    assert typical_inputs(SPECS, samples, SIZES, 2)["attention_mask"].shape == (2, 8)


def test_a_fixed_length_is_not_cut() -> None:
    fixed = tuple(TensorSpec(spec.name, spec.dtype, ("batch", 32)) for spec in SPECS)
    assert typical_inputs(fixed, padded(3, 5), SIZES, 1)["input_ids"].shape == (1, 32)


def test_inputs_without_a_mask_are_the_first_rows() -> None:
    specs, samples = SPECS[:1], padded(3, 5, 7)
    assert torch.equal(typical_inputs(specs, samples, SIZES, 2)["input_ids"], samples["input_ids"][:2])
    assert timed_lengths(specs, samples, SIZES, 2) is None


def test_only_dimensions_of_the_length_are_cut() -> None:
    specs = (*SPECS, TensorSpec("bias", "float32", ("batch", 32, "seq")))
    inputs = cut(padded(3) | {"bias": torch.zeros(1, 32, 32)}, specs, SIZES, 4)
    assert {name: list(value.shape) for name, value in inputs.items()} == {
        "input_ids": [1, 4],
        "attention_mask": [1, 4],
        "bias": [1, 32, 4],
    }


@pytest.mark.parametrize("batch", [1, 3])
def test_operations_are_those_of_the_tokens_not_of_padding(batch: int) -> None:
    flops = roofline.flops_of_call(encoder(padded(4, 6, 8)), batch)
    assert flops == batch * 6 * 2 * WIDTH * WIDTH


def test_operations_of_a_fixed_length_are_never_too_many() -> None:
    flops = roofline.flops_of_call(encoder(padded(4, 8, 16), fixed=True), 1)
    assert flops == 32 * 2 * WIDTH * WIDTH * (8 / 32) ** 2


def test_a_row_more_padded_has_the_same_roofline() -> None:
    few, many = (roofline.flops_of_call(encoder(padded(4, 6, 8, width=w)), 3) for w in (8, 32))
    assert few == many


class WrongAtOtherLengths:
    """Runner of a program that was compiled for one length and gives zeros at others."""

    def __init__(self, graph: TorchGraph, length: int) -> None:
        self._run, self._length = graph.run, length

    def run(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        found = self._run(inputs)
        right = inputs["input_ids"].shape[1] == self._length
        return found if right else {name: torch.zeros_like(value) for name, value in found.items()}


def test_a_backend_that_is_right_only_at_the_samples_length_is_found() -> None:
    graph = encoder(padded(4, 6, 9))
    whole, reference = fidelity.Comparison(graph.task), RememberedOutputs(graph)
    whole.add(graph.run(graph.samples), graph.run(graph.samples), graph.samples)
    wrong = WrongAtOtherLengths(graph, 32)
    metrics = run_trial._at_sizes(reference, wrong, wrong.run, graph, {"output": 1.0}, whole)
    errors = {metric.subject: metric.number for metric in metrics if metric.name == "relative_error"}
    assert min(errors["batch 1"] or 0.0, errors["batch 3"] or 0.0) > 0.1
    metrics = run_trial._at_sizes(reference, graph, graph.run, graph, {"output": 1.0}, whole)
    assert {metric.number for metric in metrics if metric.name == "relative_error"} == {0.0}
