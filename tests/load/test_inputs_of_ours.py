"""Inputs of ours: they fit what a model takes, where its user gives none."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from infer.load.samples import drawn_images, inputs_of_ours
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


def test_single_numbers_are_usual_parameters_and_a_name_tells_of_sound() -> None:
    found = drawn(
        "audio=float32[1,2048]", "fmin=float32[]", "f_max=float32[1]", "threshold=float32[]", "gain=float32[]"
    )
    numbers = [float(found[name]) for name in ("fmin", "f_max", "threshold", "gain")]
    assert numbers == pytest.approx([0.0, 1000.0, 0.3, 1.0])
    heard, plain = (drawn(f"{name}=float32[batch,2048]")[name][0] for name in ("waveform", "x"))
    neighbours = [float((row[1:] * row[:-1]).mean() / row.square().mean()) for row in (heard, plain)]
    assert neighbours[0] > 0.8 > 0.2 > neighbours[1]  # a voice, and noise


@pytest.mark.parametrize(
    ("sound", "length"),
    [
        ("waveforms=float32[batch,N]", 16_000),
        ("audio=float32[1,1,N]", 16_000),
        ("wav=float32[batch,N,257]", 64),
    ],
)
def test_what_is_called_a_sound_is_a_second_long_and_frames_are_few(sound: str, length: int) -> None:
    (value,) = drawn(sound).values()
    assert value.shape[TensorSpec.parse(sound).shape.index("N")] == length


def test_lengths_say_how_much_of_each_row_is_filled() -> None:
    specs = ("ids=int64[batch,seq]", "marks=int64[batch,seq]", "input_lengths=int64[batch]", "flow=float32[]")
    tried = list[Tensor]()

    def takes(inputs: dict[str, Tensor]) -> bool:
        tried.append(inputs["input_lengths"])
        return int(inputs["ids"].max()) < 40

    given = drawn(*specs, takes=takes)
    assert 32 <= int(given["input_lengths"].min()) < int(given["input_lengths"].max()) <= 64
    assert {int(lengths[0]) for lengths in tried} == {64}  # also where another input is tried
    assert drawn("x=float32[1,time]", "x_len=int32[1]")["x_len"].tolist() == [64]
    assert given["flow"].item() == 1  # no lower end of a range


def test_texts_of_ours_are_many_and_real() -> None:
    texts = inputs_of_ours.texts()
    assert len(texts) > 300
    assert any("iterable" in text for text in texts)


def test_drawn_images_and_sounds_hold_structure() -> None:
    for text in (False, True):
        scene = drawn_images.draw(0, 96, 200, text=text)
        assert scene.shape == (96, 200, 3)
        assert scene.std() > 10
    voice = inputs_of_ours._voice(np.random.default_rng(0))
    assert np.abs(voice).max() == 1
    assert len(voice) == 48_000


@pytest.mark.parametrize(("scale", "low", "high"), [(1.0, -1.0, 1.0), (0.01, 0.0, 255.0)])
def test_pictures_are_in_the_range_of_the_first_convolution(scale: float, low: float, high: float) -> None:
    class Photographs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3)
            nn.init.normal_(self.first.weight, std=scale / 27**0.5)

    loaded = SimpleNamespace(module=Photographs(), kind="module")
    values = drawn_images.value_range(loaded)  # type: ignore[arg-type]
    for shape in ([3, 40, 64], [40, 64, 1]):
        for seed in (0, 1):
            picture = drawn_images.row(shape, seed, values)
            assert list(picture.shape) == shape
            assert low <= picture.min() < picture.max() <= high
            assert picture.std() > 0.02 * (high - low)
    assert drawn_images.channel_axis([3, 16, 16]) is None  # too small for one
    assert drawn_images.channel_axis([12, 40, 64]) is None


@pytest.mark.parametrize("size", [24, 32, 64, 256])
def test_text_is_drawn_at_any_size(size: int) -> None:
    plain, written = (drawn_images.draw(4, size, 3 * size, text=text) for text in (False, True))
    assert (plain.astype(int) != written).mean() > 0.2


@pytest.mark.parametrize(
    ("texts", "sounds"), [(("x=float32[batch,9000,1]", "sr=int64[]"), 3), (("x=float32[batch,9000]",), 1)]
)
def test_long_rows_are_sounds_now_and_then_and_mostly_beside_a_rate(
    texts: tuple[str, ...], sounds: int
) -> None:
    rows = drawn(*texts)["x"].flatten(1)
    ahead = (rows[:, 1:] * rows[:, :-1]).mean(1) / rows.square().mean(
        1
    )  # a wave resembles itself one step later
    waves = (ahead > 0.5) & (rows.mean(1).abs() < 0.05)
    assert int(waves[:8].sum()) >= 2 * sounds
    assert float(rows[waves].abs().max()) <= (0.6 if sounds == 3 else 10)
