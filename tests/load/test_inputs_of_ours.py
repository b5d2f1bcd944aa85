"""Inputs of ours: they fit what a model takes, where its user gives none."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from infer.load.samples import inputs_of_ours
from infer.spec import TensorSpec


def drawn(*texts: str, takes: object = None, **sizes: tuple[int, int]) -> dict[str, Tensor]:
    specs = tuple(TensorSpec.parse(text) for text in texts)
    return inputs_of_ours.tensors(specs, 0, sizes=sizes, runs=takes)  # type: ignore[arg-type]


def test_integers_reach_to_the_largest_that_the_model_takes() -> None:
    table = torch.zeros(37, 4)

    def takes(inputs: dict[str, Tensor]) -> bool:
        return int(inputs["ids"].max()) < len(table)

    ids = drawn("ids=int64[batch,9]", takes=takes)["ids"]
    assert (int(ids.min()), int(ids.max())) == (0, 36)


def test_a_symbolic_size_is_one_that_the_model_runs_with() -> None:
    def takes(inputs: dict[str, Tensor]) -> bool:
        return inputs["x"].shape[1] == 512

    assert drawn("x=float32[batch,time]", takes=takes)["x"].shape == (inputs_of_ours.ROWS, 512)


def test_one_free_size_may_be_another_than_the_rest() -> None:
    largest = 0

    def takes(inputs: dict[str, Tensor]) -> bool:
        nonlocal largest
        largest = max(largest, inputs["frame"].numel())
        return inputs["bits"].shape[1] == 32

    given = drawn("frame=float32[batch,3,height,width]", "bits=float32[batch,count]", takes=takes)
    assert given["frame"].shape == (inputs_of_ours.ROWS, 3, 64, 64)
    assert given["bits"].shape == (inputs_of_ours.ROWS, 32)
    assert largest <= inputs_of_ours.MOST_VALUES  # of the trials that failed, none took gigabytes


def test_rows_are_of_several_distributions_and_the_same_at_every_call() -> None:
    first, second = (drawn("x=float32[batch,3,16,16]", "mask=int64[batch,5]") for _ in range(2))
    assert torch.equal(first["x"], second["x"])
    assert bool((first["mask"] == 1).all())
    deviations = first["x"].flatten(1).std(1)
    assert deviations[0] > 5 * deviations[3]
    assert bool((first["x"][2] >= 0).all())


def test_a_scalar_rate_and_a_state_beside_the_rows_are_given() -> None:
    found = drawn("input=float32[batch,512]", "state=float32[2,batch,128]", "sr=int64[]")
    assert found["sr"].shape == ()
    assert int(found["sr"]) == 16_000
    assert [found[name].shape for name in ("input", "state")] == [(64, 512), (2, 64, 128)]


def test_texts_of_ours_are_many_and_real() -> None:
    texts = inputs_of_ours.texts()
    assert len(texts) > 300
    assert any("iterable" in text for text in texts)


def test_drawn_images_and_sounds_hold_structure() -> None:
    scene = inputs_of_ours._scene(np.random.default_rng(0))
    assert scene.shape == (256, 256, 3)
    assert scene.std() > 10
    voice = inputs_of_ours._voice(np.random.default_rng(0))
    assert np.abs(voice).max() == 1
    assert len(voice) == 48_000
