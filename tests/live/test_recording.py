"""Calls of a running program are recorded, and verified modules take the place of its own."""

from __future__ import annotations

from collections import UserDict

import pytest
import torch
from torch import nn

import infer
from infer.errors import UsageError
from infer.live.compiled_model import CompiledModel

QUICK = {"backend": "eager", "allow_slower": True, "batches": (1,)}


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(50, 16), nn.Linear(16, 8)

    def forward(self, ids):
        return self.out(self.embed(ids).mean(1))


class Branching(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x - 1


class Denoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(16, 8)

    def forward(self, sample, step, condition=None):
        mixed = self.mix(torch.cat([sample, condition], -1))
        return {"sample": sample - 0.1 * mixed * (step + 1).float().rsqrt()}


class Pipeline:
    """A program with three modules, of which one can't be captured."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.name = "pipeline"
        self.encoder, self.parts = Encoder().eval(), {"denoiser": Denoiser().eval()}
        self.last = nn.Sequential(Branching(), nn.Identity()).eval()

    @torch.no_grad()
    def __call__(self, ids, steps=4):
        condition = self.encoder(ids)
        sample = torch.ones(len(ids), 8)
        for step in range(steps):
            sample = self.parts["denoiser"](sample, torch.tensor(step), condition=condition)["sample"]
        return self.last(sample)


def ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(0, 50, (rows, length))


def test_recorded_modules_are_replaced_and_restored() -> None:
    pipeline = Pipeline()
    encoder, denoiser, branching = pipeline.encoder, pipeline.parts["denoiser"], pipeline.last[0]
    with infer.record(encoder, denoiser, branching) as calls:
        for rows, length in ((2, 5), (3, 9), (2, 7)):
            pipeline(ids(rows, length))
    assert (calls.count(encoder), calls.count(denoiser)) == (3, 12)
    words = [ids(2, 6), ids(4, 9)]
    expected = [pipeline(word) for word in words]
    first, second, third = infer.replace(pipeline, calls, **QUICK)
    assert (first.place, second.place, third.place) == ("encoder", "parts.denoiser", "last.0")
    assert pipeline.encoder is first.compiled
    assert pipeline.parts["denoiser"] is second.compiled
    assert third.compiled is None
    assert "value of a tensor" in third.reason
    assert pipeline.last[0] is branching
    for word, wanted in zip(words, expected, strict=True):
        torch.testing.assert_close(pipeline(word), wanted, rtol=1e-4, atol=1e-5)
    assert not first.compiled.misses
    assert not second.compiled.misses
    pipeline(ids(2, 40))
    assert first.compiled.misses == {"other sizes or dtypes": 1}
    assert infer.restore(pipeline) == 2
    assert (pipeline.encoder, pipeline.parts["denoiser"]) == (encoder, denoiser)
    assert infer.restore(pipeline) == 0


def test_a_recording_is_bounded_and_holds_every_shape() -> None:
    module = nn.Identity()
    with infer.record(module, most_calls=12) as calls:
        for index in range(500):
            module(torch.full((1, 2 if index == 400 else 1 + index % 2 * 2), float(index)))
    kept = [call.args[0] for call in calls.of(module)]
    assert calls.count(module) == 500
    assert len(kept) <= 12
    assert {value.shape[1] for value in kept} == {1, 2, 3}
    assert max(float(value[0, 0]) for value in kept) > 400  # drawn from the whole of the run
    assert "500 calls" in repr(calls)


def test_a_recording_is_bounded_in_bytes() -> None:
    module = nn.Identity()
    with infer.record(module, most_bytes=4000) as calls:
        for length in range(1, 200):
            module(torch.zeros(length))
    assert sum(call.num_bytes for call in calls.of(module)) <= 4000
    with infer.record(module, most_bytes=10) as calls:
        module(torch.zeros(100))
        module(torch.zeros(100))
    assert len(calls.of(module)) == 1


def test_recorded_tensors_are_those_of_the_moment_of_the_call() -> None:
    module, value = nn.Identity(), torch.ones(3)
    with infer.record(module) as calls:
        module(value)
        value.zero_()
    module(torch.ones(3))  # outside the block
    with infer.record(Marking()) as marked:
        marked.modules[0](UserDict(x=value))
    assert list(marked.of(marked.modules[0])[0].args[0]) == ["x"]
    (call,) = calls.of(module)
    assert call.args[0].tolist() == [1, 1, 1]


class Marking(nn.Module):
    def forward(self, features):
        features["seen"] = features["x"]
        return features


def test_modules_that_were_not_recorded_or_are_elsewhere_are_named() -> None:
    module = nn.Identity()
    with infer.record(module) as calls:
        module(torch.ones(1))
    with pytest.raises(UsageError, match="Linear was not recorded"):
        calls.of(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="Identity is no part of Pipeline"):
        infer.replace(Pipeline(), calls, **QUICK)
    with pytest.raises(UsageError, match="expected modules, got str"), infer.record("unet"):
        pass


def test_a_module_that_was_never_called_stays_with_that_reason() -> None:
    pipeline = Pipeline()
    with infer.record(pipeline.encoder) as calls:
        pass
    (only,) = infer.replace(pipeline, calls, **QUICK)
    assert "no call of the model was recorded" in only.reason
    assert not isinstance(pipeline.encoder, CompiledModel)
