"""Models of timm and torchvision by name: their weights, classes, images and refusals, over stubs of the libraries."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from infer import Plan, Predictor, load, optimize
from infer.cli.optimize import default_output
from infer.errors import NotUsableError, SourceError, UsageError
from infer.load.identification.identify import identify
from infer.load.model_libraries import library_model
from infer.preprocess.image import ImagePreprocessor
from tests.support.stub_model_libraries import Segmenter, Tiny, Transform, stub_timm, stub_torchvision


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", stub_timm())
    monkeypatch.setitem(sys.modules, "torchvision", stub_torchvision())


def trained(made: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter)
    return made.eval()


def saved(made: nn.Module, path: Path) -> str:
    torch.save(made.state_dict(), path)
    return str(path)


def opened(source: str, **options: Any) -> load.LoadedModel:
    found = load.load(Plan(source=source, **{"data": "random", **options}))
    load.fill(found)
    return found


def run(loaded: load.LoadedModel, images: Tensor) -> Tensor:
    assert loaded.module is not None
    with torch.no_grad():
        return loaded.module(pixel_values=images)


@pytest.mark.parametrize("library", ["timm", "torchvision"])
@pytest.mark.parametrize("by_model", [False, True], ids=["--weights", "--model"])
def test_a_checkpoint_has_its_own_number_of_classes(library: str, by_model: bool, tmp_path: Path) -> None:
    made, name = trained(Tiny(7)), f"{library}:tiny_net"
    path = saved(nn.ModuleDict({"module": made}), tmp_path / "w.pt")
    found = opened(path, model=name) if by_model else opened(name, weights=path)
    images = torch.randn(3, 3, 24, 24)
    torch.testing.assert_close(run(found, images), made(images))
    assert (found.task, found.outputs, "labels" in found.meta) == ("image-classification", ("logits",), False)
    assert found.inputs[0].format() == "pixel_values=float32[batch,3,24,24]"


@pytest.mark.parametrize(
    ("name", "first", "shortest"),
    [
        ("timm:tiny_net", "class 0", 30),
        ("torchvision:tiny_net", "v2 0", 30),
        ("torchvision:tiny_net.IMAGENET1K_V1", "v1 0", 30),
    ],
)
def test_class_names_and_preprocessing_come_from_the_library(
    name: str, first: str, shortest: int, tmp_path: Path
) -> None:
    found = opened(name, weights=saved(trained(Tiny(1000)), tmp_path / "w.pt"))
    assert found.meta["labels"][0] == first
    assert isinstance(found.preprocessor, ImagePreprocessor)
    assert (found.preprocessor.shortest_edge, found.preprocessor.crop) == (shortest, (24, 24))


def test_a_checkpoint_without_classifier_gives_features(tmp_path: Path) -> None:
    made = trained(Tiny(0))
    found = opened("timm:tiny_net", weights=saved(made, tmp_path / "w.pt"))
    images = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(run(found, images), made(images))
    assert (found.task, found.outputs) == ("image-embedding", ("embedding",))


def test_auxiliary_heads_of_a_segmenter_are_dropped(tmp_path: Path) -> None:
    made = trained(Segmenter(21, aux=True))
    found = opened("torchvision:fcn", weights=saved(made, tmp_path / "w.pt"))
    images = torch.randn(2, 3, 30, 37)
    torch.testing.assert_close(run(found, images), made(images)["out"])
    assert (found.task, found.meta["labels"][1]) == ("image-segmentation", "voc 1")
    assert found.inputs[0].shape == ("batch", 3, "height", "width")


def test_a_folder_of_timm_opens_with_its_class_names(tmp_path: Path) -> None:
    made = trained(Tiny(2))
    save_file(made.state_dict(), tmp_path / "model.safetensors")
    config = {"num_classes": 2, "label_names": ["n1", "n2"], "label_descriptions": {"n1": "cat"}}
    (tmp_path / "config.json").write_text(json.dumps({"architecture": "tiny_net", "pretrained_cfg": config}))
    assert identify(tmp_path).kind == "timm"
    found = opened(str(tmp_path))
    images = torch.randn(2, 3, 24, 24)
    torch.testing.assert_close(run(found, images), made(images))
    assert found.meta["labels"] == ["cat", "n2"]


def test_the_input_option_sets_another_image_size(tmp_path: Path) -> None:
    path = saved(trained(Tiny(7)), tmp_path / "w.pt")
    found = opened("timm:tiny_net", weights=path, inputs=("pixel_values=float32[batch,3,32,32]",))
    assert found.inputs[0].shape == ("batch", 3, 32, 32)
    assert isinstance(found.preprocessor, ImagePreprocessor)
    assert (found.preprocessor.crop, found.preprocessor.shortest_edge) == ((32, 32), 40)
    with pytest.raises(UsageError, match=r"takes one input, pixel_values=float32\[batch,3,24,24\]"):
        opened("timm:tiny_net", weights=path, inputs=("x=float32[batch,3,32,32]",))


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("timm:tiny_nett", {}, "timm has no model named 'tiny_nett'. Did you mean tiny_net, tiny_net_large"),
        ("timm:tiny_net.a9", {}, "no weights with the tag 'a9'. Known: a1_in1k, a2_in1k"),
        ("timm:tiny_net", {}, "names a model, not its weights; nothing is downloaded - at --weights"),
        ("timm:tiny_net", {"model": "m.py:build"}, "is a model already - at --model"),
        ("torchvision:tiny", {}, "torchvision has no model named 'tiny'. Did you mean tiny_net"),
        ("torchvision:tiny_net.V9", {}, "no weights named 'V9'. Known: IMAGENET1K_V1, IMAGENET1K_V2"),
        ("torchvision:boxes", {}, "takes a list of images and returns a list of boxes"),
        (
            "torchvision:googlenet",
            {},
            "transform_input=True, a second normalization that a checkpoint does not record",
        ),
        (
            "net.pt",
            {"weights": "w.pt"},
            "--weights goes with a source timm:NAME or torchvision:NAME, got net.pt",
        ),
    ],
)
def test_an_unknown_library_model_name_is_refused(source: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        opened(source, **options)
    assert message in str(caught.value)


def test_a_checkpoint_of_another_model_does_not_fit(tmp_path: Path) -> None:
    path = saved(nn.Linear(3, 2), tmp_path / "w.pt")
    with pytest.raises(
        SourceError, match=r"does not fit the model: .* missing in the checkpoint: conv\.weight"
    ):
        opened("timm:tiny_net", weights=path)
    with pytest.raises(SourceError, match="there is no such file"):
        opened("timm:tiny_net", weights=str(tmp_path / "absent.pt"))


def test_without_its_library_a_name_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr(library_model, "import_module", broken)
    with pytest.raises(
        NotUsableError, match=r"timm can't be imported here: .*nms does not exist.* built for torch"
    ):
        opened("timm:tiny_net")
    monkeypatch.setattr(library_model, "find_spec", lambda name: None)
    with pytest.raises(
        NotUsableError, match=r"timm:tiny_net needs the package timm.* pip install 'infer-engine\[vision\]'"
    ):
        opened("timm:tiny_net")


@pytest.mark.parametrize("size", [(61, 97), (40, 33), (24, 24), (90, 31), (25, 24)])
def test_an_odd_pixel_of_a_crop_lies_where_torchvision_puts_it(size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    steps = ImagePreprocessor(shortest_edge=31, resample=3, crop=(24, 24), rounds_crop=True, scale=1 / 255,
                              mean=(0.5,) * 3, std=(0.5,) * 3)  # fmt: skip
    theirs = Transform(31, 24, (0.5,) * 3, (0.5,) * 3)(Image.fromarray(pixels)).numpy()
    np.testing.assert_allclose(steps.row(Image.fromarray(pixels)), theirs, atol=1e-5)


def test_random_weights_need_an_option_and_are_in_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "random.infer"
    plan = Plan(source="timm:tiny_net", weights="random", data="random", backend="eager", batches=())
    outcome = optimize(plan, path)
    assert any("its weights are random" in line for line in outcome.report.verdict)
    Image.fromarray(np.zeros((50, 40, 3), np.uint8)).save(tmp_path / "x.png")
    with Predictor.load(path) as predictor:
        assert predictor.predict(str(tmp_path / "x.png"))[0]["label"].startswith("class ")


def test_the_output_is_called_by_the_models_name() -> None:
    assert default_output("timm:resnet18.a1_in1k").name == "resnet18.a1_in1k.infer"
