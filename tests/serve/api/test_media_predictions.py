"""/predict and /classify for images and sound: base64, forms, and bodies that are the file itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from infer.serve.limits import ServeLimits
from infer.tasks import answers
from tests.support import fake_media
from tests.support.fake_media import png, wav
from tests.support.fake_predictors import Live, classifier, live

RED, GREEN = (250, 10, 10), (10, 250, 10)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    models = [
        fake_media.colors(), fake_media.detector(), fake_media.segmenter(), fake_media.image_embedder(),
        fake_media.listener(), fake_media.depth_estimator(), classifier("moods", ["good", "bad"]),
    ]  # fmt: skip
    with live(*models, limits=ServeLimits(max_image_pixels=1 << 20, max_audio_seconds=3)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url) as client:
        yield client


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def two_halves(size: tuple[int, int] = (40, 20)) -> bytes:
    return fake_media.two_colors(RED, GREEN, size)


def ask(client: httpx.Client, model: str, inputs: Any, path: str = "/predict", **more: Any) -> Any:
    answer = client.post(path, json={"model": model, "inputs": inputs, **more})
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", ["/predict", "/classify"])
def test_an_image_has_labels_best_first(client: httpx.Client, path: str) -> None:
    found = ask(client, "colors", b64(png(GREEN)), path)
    assert [one["label"] for one in found] == ["green", "red", "blue"]
    assert set(found[0]) == {"label", "score"}
    assert sum(one["score"] for one in found) == pytest.approx(1)
    both = ask(client, "colors", [f"data:image/png;base64,{b64(png(c))}" for c in (RED, GREEN)], path)
    assert [one[0]["label"] for one in both] == ["red", "green"]


def test_parameters_are_those_of_hugging_face(client: httpx.Client) -> None:
    (best,) = ask(client, "colors", b64(png(GREEN)), parameters={"top_k": 1, "function_to_apply": "sigmoid"})
    assert best["score"] == pytest.approx(1 / (1 + np.exp(-4 * 250 / 255)), abs=1e-4)
    raw = ask(client, "colors", b64(png(GREEN)), raw_scores=True)
    assert raw[0]["score"] == pytest.approx(4 * 250 / 255, abs=1e-4)


def test_multipart_forms_and_raw_file_bodies_are_read(client: httpx.Client) -> None:
    want = ask(client, "colors", b64(png(RED)))
    files = {"file": ("a.png", png(RED))}
    assert client.post("/predict", data={"model": "colors"}, files=files).json() == want
    top = client.post("/predict", data={"model": "colors", "top_k": "1"}, files=files).json()
    assert top == want[:1]
    answer = client.post("/predict", content=png(RED), headers={"content-type": "image/png"})
    assert answer.status_code == 400
    assert "one of colors, finder" in answer.json()["error"]
    with live(fake_media.colors()) as alone:
        for media in ("image/png", "application/octet-stream"):
            answer = httpx.post(f"{alone.url}/predict", content=png(RED), headers={"content-type": media})
            assert answer.json() == want


def test_the_inference_client_of_hugging_face_reads_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with live(fake_media.colors()) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
        assert client.image_classification(png(GREEN))[0].label == "green"
        assert len(client.image_classification(png(GREEN), top_k=2)) == 2
    with live(fake_media.detector()) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
        found = client.object_detection(two_halves(), threshold=0.5)
        assert [one.label for one in found] == ["red", "green"]
        assert found[0].box.xmax == 20
    with live(fake_media.segmenter()) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
        found = client.image_segmentation(two_halves())
        assert {one.label: one.mask.size for one in found} == {"red": (40, 20), "green": (40, 20)}
    with live(fake_media.listener()) as server:
        client = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
        assert client.audio_classification(wav(np.ones(400) * 0.9))[0].label == "loud"


def test_object_detection_returns_boxes_in_pixels(client: httpx.Client) -> None:
    found = ask(client, "finder", b64(two_halves()))
    assert [one["label"] for one in found] == ["red", "green"]
    assert found[0]["box"] == {"xmin": 0, "ymin": 0, "xmax": 20, "ymax": 20}
    assert ask(client, "finder", b64(two_halves()), parameters={"threshold": 1}) == []


def test_depth_is_a_map_of_the_size_of_the_image(client: httpx.Client) -> None:
    (found,) = ask(client, "deep", b64(two_halves((40, 20))))
    assert (found["label"], found["score"]) == ("depth", None)
    with Image.open(io.BytesIO(base64.b64decode(found["mask"]))) as image:
        depth = np.asarray(image)
    assert depth.shape == (20, 40)
    assert (depth[:, 0] == 255).all()
    assert (depth[:, -1] == 0).all()


def test_classes_have_masks_of_the_size_of_the_image(client: httpx.Client) -> None:
    found = ask(client, "parts", b64(two_halves((40, 20))))
    assert {one["label"] for one in found} == {"red", "green"}
    masks = {}
    for one in found:
        assert one["score"] is None
        with Image.open(io.BytesIO(base64.b64decode(one["mask"]))) as image:
            masks[one["label"]] = np.asarray(image)
    assert masks["red"].shape == (20, 40)
    assert (masks["red"].astype(int) + masks["green"] == 255).all()
    assert masks["red"][:, :18].all()


@pytest.mark.parametrize("size", [(64, 80), (31, 7), (4, 4), (1, 1), (3, 2)])
def test_class_maps_are_those_of_transformers(size: tuple[int, int]) -> None:
    torch = pytest.importorskip("torch")
    logits = np.random.default_rng(0).standard_normal((5, 4, 6)).astype(np.float32)
    want = torch.nn.functional.interpolate(
        torch.from_numpy(logits)[None], size=size, mode="bilinear", align_corners=False
    )
    assert (answers.class_map(logits, size) == want[0].argmax(0).numpy()).mean() == 1


def test_boxes_of_sigmoid_detectors_are_those_of_transformers() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((20, 3)).astype(np.float32)
    centers = generator.uniform(0.2, 0.6, (20, 4)).astype(np.float32)
    output = type(
        "Output",
        (),
        {"logits": torch.from_numpy(logits)[None], "pred_boxes": torch.from_numpy(centers)[None]},
    )
    processor = transformers.RTDetrImageProcessor()
    (want,) = processor.post_process_object_detection(output(), threshold=0.6, target_sizes=[(50, 70)])
    found = answers.boxes(logits, centers, (50, 70), ["a", "b", "c"], 0.6)
    assert [one["score"] for one in found] == pytest.approx(want["scores"].tolist(), abs=1e-6)
    assert [one["label"] for one in found] == ["abc"[i] for i in want["labels"]]
    boxes = [[one["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for one in found]
    np.testing.assert_allclose(boxes, want["boxes"].numpy(), atol=1.01)


def test_an_image_embedding_is_a_json_list(client: httpx.Client) -> None:
    assert ask(client, "look", b64(png(RED))) == pytest.approx([250 / 255, 10 / 255, 10 / 255])


def test_audio_classification_returns_labels(client: httpx.Client) -> None:
    loud, quiet = wav(np.ones(400) * 0.9), wav(np.ones(4000) * 0.1, 8000)
    found = ask(client, "loudness", [b64(loud), b64(quiet)])
    assert [one[0]["label"] for one in found] == ["loud", "quiet"]
    answer = client.post("/predict", data={"model": "loudness"}, files={"file": ("a.wav", loud)})
    assert answer.json()[0]["label"] == "loud"


def test_classify_gives_probabilities_as_vllm_does(client: httpx.Client) -> None:
    body = {"model": "colors", "input": [b64(png(RED)), b64(png(GREEN))]}
    answer = client.post("/classify", json=body).json()
    assert [one["label"] for one in answer["data"]] == ["red", "green"]
    assert sum(answer["data"][0]["probs"]) == pytest.approx(1, abs=1e-5)
    assert {one["num_classes"] for one in answer["data"]} == {3}


REFUSED: list[tuple[str, str, Any, int, str]] = [
    ("address", "colors", "http://127.0.0.1/a.png", 400, "addresses are not fetched"),
    ("file", "colors", "file:///etc/passwd", 400, "addresses are not fetched"),
    ("no base64", "colors", "not base64!", 400, "expected a file as base64"),
    ("no image", "colors", b64(b"no image"), 400, "expected an image file"),
    ("empty", "colors", "", 400, "not empty"),
    ("none", "colors", [], 400, "expected 1 to 64 files, got 0"),
    ("many", "colors", [b64(b"a")] * 65, 400, "expected 1 to 64 files, got 65"),
    ("pair", "colors", [["a", "b"]], 400, "expected a file as base64"),
    ("one of two", "colors", [b64(png(RED)), b64(b"x")], 400, "inputs[1]"),
    ("wav", "colors", b64(wav(np.ones(100))), 400, "expected an image file"),
    ("long", "loudness", b64(wav(np.zeros(4000 * 4))), 400, "at most 3 s of sound"),
    ("short", "loudness", b64(wav(np.zeros(5))), 400, "expected samples between 10"),
    ("text", "moods", b64(png(RED)), 200, "good"),
]


@pytest.mark.parametrize(
    ("model", "inputs", "status", "text"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_an_invalid_media_file_is_refused_with_a_message(
    client: httpx.Client, model: str, inputs: Any, status: int, text: str
) -> None:
    answer = client.post("/predict", json={"model": model, "inputs": inputs})
    assert (answer.status_code, text in answer.text) == (status, True), answer.text


def test_a_decompression_bomb_is_refused_before_it_is_decoded(client: httpx.Client) -> None:
    file = io.BytesIO()
    Image.new("1", (9_000, 9_000)).save(file, "png")
    answer = client.post("/predict", data={"model": "colors"}, files={"file": ("a.png", file.getvalue())})
    assert answer.status_code == 400
    assert "expected an image of at most 1048576 pixels" in answer.text


def test_a_file_for_a_model_of_texts_is_refused(client: httpx.Client) -> None:
    answer = client.post("/predict", data={"model": "moods"}, files={"file": ("a.png", png(RED))})
    assert (answer.status_code, "is a model of texts" in answer.text) == (400, True)
    fake = fake_media.colors()
    fake.info.meta.clear()
    with live(fake) as server:
        answer = httpx.post(f"{server.url}/predict", json={"inputs": b64(png(RED))})
        assert (answer.status_code, "takes tensors only" in answer.text) == (501, True)
