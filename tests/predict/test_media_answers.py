"""Images with boxes and classes of pixels, and sound with labels and text: as transformers' own post-processing."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from infer import Plan, Predictor, optimize
from infer.cli import main
from infer.errors import UsageError
from infer.load import fill, load
from infer.tasks import answers
from infer.tasks.ctc import CTCDecoder

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
LABELS = {0: "cat", 1: "dog", 2: "mat"}
NAMED = {"id2label": LABELS, "label2id": {name: i for i, name in LABELS.items()}}
SPEECH = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "conv_dim": [16] * 7,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
    "classifier_proj_size": 16,
}


def save(model: Any, folder: Path) -> Any:
    """Save a model whose random weights are scaled so that its outputs vary."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1 and len(parameter):
            torch.nn.init.normal_(parameter, std=1.5 / max(1, parameter[0].numel()) ** 0.5)
    model.eval().save_pretrained(folder)
    return model


def made(folder: Path, data: Path) -> Predictor:
    plan = Plan(source=str(folder), data=str(data), backend="eager", batches=())
    return Predictor.load(optimize(plan, folder.with_suffix(".infer")).path)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    for index, size in enumerate(((90, 64), (64, 80), (70, 70))):
        noise = np.random.default_rng(index).integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder


@pytest.fixture
def sounds(tmp_path: Path) -> Path:
    folder = tmp_path / "sounds"
    folder.mkdir()
    for index, rate in enumerate((16000, 16000, 8000)):
        samples = np.random.default_rng(index).normal(0, 3000, int(rate * 0.4)).astype("<i2")
        with wave.open(str(folder / f"{index}.wav"), "wb") as file:
            file.setparams((1, 2, rate, len(samples), "NONE", ""))
            file.writeframes(samples.tobytes())
    return folder


def test_objects_have_the_boxes_of_transformers(tmp_path: Path, images: Path) -> None:
    config = transformers.YolosConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=[64, 64],
        patch_size=16, num_detection_tokens=7, **NAMED,
    )  # fmt: skip
    model = save(transformers.YolosForObjectDetection(config), tmp_path / "m")
    processor = transformers.DetrImageProcessorPil(size={"height": 64, "width": 64}, do_pad=False)
    transformers.ViTImageProcessorPil(
        size={"height": 64, "width": 64}, image_mean=processor.image_mean, image_std=processor.image_std
    ).save_pretrained(tmp_path / "m")
    image = Image.open(images / "0.png")
    with made(tmp_path / "m", images) as predictor:
        assert predictor.task == "object-detection"
        tensors = predictor.predict(predictor.preprocess([image]))
        found = answers.boxes(
            tensors["logits"][0], tensors["pred_boxes"][0], (64, 90), list(LABELS.values()), 0.1
        )
        assert isinstance(predictor.predict(image), list)
    with torch.no_grad():
        out = model(pixel_values=processor(images=image, return_tensors="pt")["pixel_values"])
    (want,) = processor.post_process_object_detection(out, threshold=0.1, target_sizes=[(64, 90)])
    order = want["scores"].argsort(descending=True, stable=True)
    assert len(order) > 1
    assert [row["label"] for row in found] == [LABELS[int(i)] for i in want["labels"][order]]
    boxes = [[row["box"][side] for side in ("xmin", "ymin", "xmax", "ymax")] for row in found]
    np.testing.assert_allclose(boxes, want["boxes"][order].numpy(), atol=1.01)


def test_segmentation_answers_give_the_area_share_of_classes(tmp_path: Path, images: Path) -> None:
    config = transformers.SegformerConfig(
        hidden_sizes=[8, 16, 24, 32],
        depths=[1] * 4,
        num_attention_heads=[1, 2, 3, 4],
        decoder_hidden_size=16,
        **NAMED,
    )
    model = save(transformers.SegformerForSemanticSegmentation(config), tmp_path / "m")
    processor = transformers.SegformerImageProcessorPil(size={"height": 64, "width": 64})
    processor.save_pretrained(tmp_path / "m")
    with made(tmp_path / "m", images) as predictor:
        assert predictor.outputs[0].shape == ("batch", 3, 16, 16)
        found = predictor.predict(images / "1.png")
    with torch.no_grad():
        classes = (
            model(**processor(images=Image.open(images / "1.png"), return_tensors="pt")).logits[0].argmax(0)
        )
    want = {LABELS[i]: float((classes == i).float().mean()) for i in range(3)}
    assert {row["label"]: row["area"] for row in found} == {k: v for k, v in want.items() if v}


def test_audio_is_classified_at_any_sampling_rate(tmp_path: Path, sounds: Path) -> None:
    model = save(
        transformers.HubertForSequenceClassification(transformers.HubertConfig(**SPEECH, **NAMED)),
        tmp_path / "m",
    )
    extractor = transformers.Wav2Vec2FeatureExtractor()
    extractor.save_pretrained(tmp_path / "m")
    with made(tmp_path / "m", sounds) as predictor:
        assert predictor.task == "audio-classification"
        found = predictor.predict(str(sounds / "0.wav"))
        assert predictor.preprocess([sounds / "2.wav"])["input_values"].shape == (1, 6400)
    with wave.open(str(sounds / "0.wav")) as file:
        samples = np.frombuffer(file.readframes(6400), "<i2").astype(np.float32) / 2**15
    with torch.no_grad():
        scores = model(**extractor(samples, sampling_rate=16000, return_tensors="pt")).logits[0].softmax(-1)
    assert {row["label"]: row["score"] for row in found} == pytest.approx(
        {LABELS[i]: float(score) for i, score in enumerate(scores)}, abs=1e-4
    )


def test_speech_becomes_the_text_of_the_tokenizer(
    tmp_path: Path, sounds: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    tokenizer = transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json"))
    tokenizer.save_pretrained(folder)
    config = transformers.Wav2Vec2Config(**SPEECH, vocab_size=len(letters), pad_token_id=0)
    model = save(transformers.Wav2Vec2ForCTC(config), folder)
    extractor = transformers.Wav2Vec2FeatureExtractor()
    extractor.save_pretrained(folder)
    with made(folder, sounds) as predictor:
        assert predictor.task == "automatic-speech-recognition"
        found = predictor.predict(str(sounds / "1.wav"))
    with wave.open(str(sounds / "1.wav")) as file:
        samples = np.frombuffer(file.readframes(6400), "<i2").astype(np.float32) / 2**15
    with torch.no_grad():
        logits = model(**extractor(samples, sampling_rate=16000, return_tensors="pt")).logits
    assert found == {"text": tokenizer.decode(logits[0].argmax(-1)).strip()}
    assert found["text"]
    assert main(["predict", str(folder.with_suffix(".infer")), str(sounds / "1.wav")]) == 0
    assert json.loads(capsys.readouterr().out) == found


@pytest.mark.parametrize("tower", ["Text", "Vision"])
def test_each_tower_of_clip_gives_its_embedding(tmp_path: Path, tower: str) -> None:
    tiny = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {
        "vocab_size": 64,
        "max_position_embeddings": 16,
        "eos_token_id": 63,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    vision = {"image_size": 32, "patch_size": 16}
    config = getattr(transformers, f"CLIP{tower}Config")(**tiny, **(sizes if tower == "Text" else vision))
    model = save(getattr(transformers, f"CLIP{tower}ModelWithProjection")(config), tmp_path / "m")
    loaded = load(Plan(source=str(tmp_path / "m"), data="random"))
    fill(loaded)
    assert (loaded.task, loaded.outputs) == (
        {"Text": "embedding", "Vision": "image-embedding"}[tower],
        ("embedding",),
    )
    ids = torch.tensor([[1, 5, 6, 63, 0, 0], [1, 7, 8, 9, 10, 63]])
    texts = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    given = texts if tower == "Text" else {"pixel_values": torch.randn(2, 3, 32, 32)}
    with torch.no_grad():
        want = model(**given)["text_embeds" if tower == "Text" else "image_embeds"]
        torch.testing.assert_close(loaded.module(**given), want)


def test_repeats_and_blanks_are_dropped_from_ctc() -> None:
    frames = np.eye(4)[[0, 2, 2, 0, 2, 1, 1, 3, 0]]
    decoder = CTCDecoder({"<pad>": 0, "|": 1, "a": 2, "b": 3}, 0)
    assert decoder.text(decoder.tokens(decoder.frames(frames))) == "aa b"


def test_boxes_below_the_threshold_are_left_out() -> None:
    logits = np.log(np.array([[0.7, 0.2, 0.1], [0.3, 0.3, 0.4]]))
    (found,) = answers.boxes(logits, np.array([[0.5, 0.5, 0.2, 0.4]] * 2), (100, 50), ["cat"])
    assert found["box"] == {"xmin": 20, "ymin": 30, "xmax": 30, "ymax": 70}
    assert answers.boxes(logits[1:], np.zeros((1, 4)), (1, 1), []) == []


def test_a_task_without_answers_is_refused_with_a_reason(tiny_artifact: Path) -> None:
    with (
        Predictor.load(tiny_artifact) as predictor,
        pytest.raises(UsageError, match="its task is text-generation"),
    ):
        predictor.predict("a text")
