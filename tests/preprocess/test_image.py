"""Image files to tensors: as transformers' image processors, and refusals of what is no image."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image

from infer.errors import ArtifactError, InputError, SourceError
from infer.load.hf_preprocessor import read_preprocessor
from infer.preprocess.image import ImagePreprocessor, open_image
from infer.preprocess.transformers_processor import TransformersProcessor
from infer.sanitize import sanitize_values

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def picture(height: int, width: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(height).integers(
        0, 256, (height // 4 + 1, width // 4 + 1, 3), dtype=np.uint8
    )
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("ViTImageProcessorPil", {"size": {"height": 32, "width": 48}, **IMAGENET}),
        ("ViTImageProcessorPil", {"size": {"height": 30, "width": 30}, "resample": 3, "do_normalize": False}),
        ("CLIPImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
        (
            "BitImageProcessorPil",
            {"size": {"shortest_edge": 37}, "crop_size": {"height": 32, "width": 33}, **IMAGENET},
        ),
        ("BitImageProcessorPil", {"size": {"shortest_edge": 20}, "crop_size": {"height": 31, "width": 31}}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_pct": 0.8}),
        ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 384}}),
        ("SegformerImageProcessorPil", {"size": {"height": 64, "width": 64}}),
        (
            "DeiTImageProcessorPil",
            {"size": {"height": 40, "width": 40}, "crop_size": {"height": 32, "width": 32}},
        ),
        ("DetrImageProcessorPil", {"size": {"shortest_edge": 40, "longest_edge": 66}}),
        ("SiglipImageProcessorPil", {"size": {"height": 24, "width": 24}}),
    ],
)
def test_preprocessed_pixels_equal_transformers(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    processor = getattr(pytest.importorskip("transformers"), name)(**values)
    processor.save_pretrained(tmp_path)
    ours, why = read_preprocessor(tmp_path, "pixel_values", 3)
    assert isinstance(ours, ImagePreprocessor), why
    for size in ((33, 95), (90, 41), (64, 64), (5, 7)):
        image = picture(*size)
        theirs = processor(images=image, return_tensors="np")
        found = ours.batch([image])
        assert set(found) == set(theirs)
        np.testing.assert_allclose(found["pixel_values"], theirs["pixel_values"], atol=1e-5)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("YolosImageProcessorPil", {"size": {"shortest_edge": 40, "longest_edge": 66}}),
        (
            "MobileViTImageProcessorPil",
            {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 32}},
        ),
        ("EfficientNetImageProcessorPil", {"size": {"height": 32, "width": 32}}),
        ("LevitImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}),
    ],
)
def test_other_processors_are_run_by_transformers(tmp_path: Path, name: str, values: dict[str, Any]) -> None:
    processor = getattr(pytest.importorskip("transformers"), name)(**values)
    processor.save_pretrained(tmp_path)
    found, why = read_preprocessor(tmp_path, "pixel_values", 3)
    assert isinstance(found, TransformersProcessor), why
    stored = msgspec.convert(sanitize_values(msgspec.to_builtins(found)), TransformersProcessor)
    assert stored.output_size == (None if "Yolos" in name else (32, 32))
    for size in ((33, 95), (90, 41), (64, 64)):
        image = picture(*size)
        theirs = processor(images=image, return_tensors="np")
        got = stored.batch([image])
        assert set(got) == set(theirs)
        np.testing.assert_array_equal(got["pixel_values"], theirs["pixel_values"])
    assert stored.batch([picture(40, 40, "RGBA")])["pixel_values"].shape[1] == 3


def test_a_class_that_is_no_processor_is_refused() -> None:
    with pytest.raises(ArtifactError, match="image processor or a feature extractor"):
        TransformersProcessor(processor="AutoModel", config="{}", tensors=(), channels=3).batch([])


def test_images_of_several_sizes_are_padded_with_their_mask() -> None:
    steps = ImagePreprocessor(
        shortest_edge=20, longest_edge=40, scale=1 / 255, mean=(0.5,) * 3, std=(0.5,) * 3, pads=True
    )
    found = steps.batch([picture(20, 35), picture(50, 25)])
    assert found["pixel_values"].shape == (2, 3, 40, 35)
    assert found["pixel_mask"].sum((1, 2)).tolist() == [20 * 35, 40 * 20]
    assert not found["pixel_values"][0, :, 20:].any()


def test_gray_and_transparent_images_have_the_channels_of_the_model() -> None:
    steps = ImagePreprocessor(size=(8, 8), scale=1 / 255)
    for mode in ("L", "RGBA", "P", "1"):
        assert steps.row(picture(20, 20, mode)).shape == (3, 8, 8)
    assert ImagePreprocessor(channels=1, size=(8, 8)).row(picture(20, 20)).shape == (1, 8, 8)


def test_an_image_is_turned_upright_by_its_exif_orientation(tmp_path: Path) -> None:
    image = picture(20, 40)
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(tmp_path / "turned.jpg", exif=exif)
    assert open_image(tmp_path / "turned.jpg").size == (20, 40)


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n" + bytes(50)])
def test_files_that_are_not_images_are_refused(data: bytes) -> None:
    with pytest.raises(SourceError, match="expected an image"):
        open_image(data)


def test_a_truncated_image_is_refused() -> None:
    file = io.BytesIO()
    picture(64, 64).save(file, "png")
    with pytest.raises(SourceError, match="expected an image"):
        open_image(file.getvalue()[:-200])


def test_an_extreme_aspect_ratio_is_refused_before_resizing() -> None:
    with pytest.raises(InputError, match="would be resized to"):
        ImagePreprocessor(shortest_edge=224).row(Image.new("RGB", (60_000, 1)))


def test_more_pixels_than_allowed_are_refused_before_decoding() -> None:
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "png")
    assert len(file.getvalue()) < 100_000
    with pytest.raises(InputError, match="at most 67108864 pixels"):
        open_image(file.getvalue())
    file = io.BytesIO()
    picture(30, 40).save(file, "png")
    with pytest.raises(InputError, match="at most 1000 pixels, got 40 x 30"):
        open_image(file.getvalue(), max_pixels=1000)


def test_a_format_that_runs_a_program_is_not_opened() -> None:
    file = io.BytesIO()
    picture(8, 8).save(file, "eps")
    with pytest.raises(SourceError, match="expected an image file, one of PNG"):
        open_image(file.getvalue())
