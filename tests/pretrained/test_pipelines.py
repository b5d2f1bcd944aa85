"""Artifacts in transformers' pipelines, class by class: a float one answers as the original, an int8 one nearly so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import infer
from infer.errors import InputError, UsageError
from tests.support.tiny_heads import LABELS, SMALL, TEXTS, bert, save, save_tokenizer

pytest.importorskip("optimum")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give
NAMED = {"id2label": {0: "cat", 1: "dog", 2: "mat"}, "label2id": {"cat": 0, "dog": 1, "mat": 2}}
PLAN: dict[str, Any] = {"backend": "eager", "batches": (), "allow_slower": True, "data": "random"}
SPEECH = {
    **SMALL, "num_hidden_layers": 1, "conv_dim": [16] * 7, "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "classifier_proj_size": 16,
}  # fmt: skip
SOUND = np.random.default_rng(0).normal(0, 0.1, 6400).astype(np.float32)
IMAGE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), dtype=np.uint8))


def opened(kind: str, folder: Path, **changes: Any) -> Any:
    return getattr(infer, f"InferModelFor{kind}").from_pretrained(folder, export=True, **{**PLAN, **changes})


def pair(
    task: str, kind: str, folder: Path, original: Any, *, plan: dict[str, Any] | None = None, **options: Any
) -> Any:
    """Pipelines over an artifact and over its original, with what the artifact's folder has for both."""
    model = opened(kind, folder, **(plan or {}))
    place = str(model.predictor.path)
    if "tokenizer" in options:
        options["tokenizer"] = transformers.AutoTokenizer.from_pretrained(place)
    if "image_processor" in options:
        options["image_processor"] = transformers.AutoImageProcessor.from_pretrained(place)
    if "feature_extractor" in options:
        options["feature_extractor"] = transformers.AutoFeatureExtractor.from_pretrained(place)
    return tuple(transformers.pipeline(task, model=one, device="cpu", **options) for one in (model, original))


def alike(found: Any, expected: Any, tolerance: float = 1e-4) -> None:
    """Compare answers: floats within the tolerance, all else equal."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            alike(found[name], value, tolerance)
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            alike(one, other, tolerance)
    elif isinstance(expected, float | np.floating):
        assert found == pytest.approx(expected, abs=tolerance)
    else:
        assert found == expected


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("classifier") / "m"
    labels = {0: "contradiction", 1: "neutral", 2: "entailment"}
    return folder, bert(
        folder, "SequenceClassification", id2label=labels, label2id={v: k for k, v in labels.items()}
    )


def test_text_classification(classifier: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    folder, original = classifier
    logging.getLogger("transformers").addHandler(caplog.handler)
    ours, theirs = pair("text-classification", "SequenceClassification", folder, original, tokenizer=1)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert "not supported" not in caplog.text
    alike(ours(TEXTS, top_k=None), theirs(TEXTS, top_k=None))
    alike(ours(TEXTS, batch_size=3), theirs(TEXTS, batch_size=3))
    pairs = [{"text": TEXTS[0], "text_pair": TEXTS[1]}]
    alike(ours(pairs), theirs(pairs))


def test_zero_shot_classification(classifier: tuple[Path, Any]) -> None:
    ours, theirs = pair("zero-shot-classification", "SequenceClassification", *classifier, tokenizer=1)
    for several in (False, True):
        asked = {"candidate_labels": ["cat", "dog on a mat", "it"], "multi_label": several}
        alike(ours(TEXTS[:2], **asked), theirs(TEXTS[:2], **asked))


def test_an_int8_classifier_is_within_its_precision(tmp_path: Path) -> None:
    wide = {**SMALL, "hidden_size": 64, "intermediate_size": 96}
    vocabulary = save_tokenizer(tmp_path / "m")
    config = transformers.BertConfig(**wide, vocab_size=vocabulary, max_position_embeddings=64, **NAMED)
    original = save(transformers.BertForSequenceClassification(config), tmp_path / "m")
    task, kind, plan = "text-classification", "SequenceClassification", {"quant": "int8"}
    ours, theirs = pair(task, kind, tmp_path / "m", original, plan=plan, tokenizer=1)
    assert "int8" in {layer.format for layer in ours.model.predictor.manifest.layers}
    found, expected = (
        [{row["label"]: row["score"] for row in answer} for answer in pipeline(TEXTS, top_k=None)]
        for pipeline in (ours, theirs)
    )
    assert found != expected
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, abs=0.05)


def test_feature_extraction(classifier: tuple[Path, Any]) -> None:
    folder, original = classifier
    ours, theirs = pair("feature-extraction", "FeatureExtraction", folder, original.bert, tokenizer=1)
    for text in TEXTS:
        np.testing.assert_allclose(ours(text), theirs(text), atol=1e-4)
    np.testing.assert_allclose(
        ours.model(**ours.tokenizer(TEXTS[0], return_tensors="pt")).pooler_output,
        original.bert(**ours.tokenizer(TEXTS[0], return_tensors="pt")).pooler_output.detach(),
        atol=1e-4,
    )


def test_token_classification(tmp_path: Path) -> None:
    original = bert(tmp_path / "m", "TokenClassification", id2label=LABELS)
    ours, theirs = pair("token-classification", "TokenClassification", tmp_path / "m", original, tokenizer=1)
    alike(ours(TEXTS), theirs(TEXTS))
    alike(ours(TEXTS, aggregation_strategy="simple"), theirs(TEXTS, aggregation_strategy="simple"))


def test_fill_mask(tmp_path: Path) -> None:
    original = bert(tmp_path / "m", "MaskedLM")
    ours, theirs = pair("fill-mask", "MaskedLM", tmp_path / "m", original, tokenizer=1)
    texts = ["the [MASK] sat on a mat", "a dog ran [MASK] away"]
    alike(ours(texts), theirs(texts))


def test_question_answering_without_a_pipeline(tmp_path: Path) -> None:
    """There is no pipeline of this task since transformers 5.23: the logits are compared."""
    original = bert(tmp_path / "m", "QuestionAnswering")
    model = opened("QuestionAnswering", tmp_path / "m")
    tokenizer = transformers.AutoTokenizer.from_pretrained(model.predictor.path)
    rows = tokenizer(TEXTS[:2], TEXTS[2:], padding=True, return_tensors="pt", return_token_type_ids=True)
    with torch.no_grad():
        expected = original(**rows)
    found = model(**rows)
    assert type(found) is type(expected)
    for name in ("start_logits", "end_logits"):
        np.testing.assert_allclose(found[name], expected[name], atol=1e-4)
    assert len(model(**rows, return_dict=False)) == 2


def test_image_classification(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**SMALL, patch_size=8, image_size=16, **NAMED)
    original = save(transformers.ViTForImageClassification(config), tmp_path / "m")
    size = {"height": 16, "width": 16}
    transformers.ViTImageProcessorPil(size=size).save_pretrained(tmp_path / "m")
    ours, theirs = pair(
        "image-classification", "ImageClassification", tmp_path / "m", original, image_processor=1
    )
    alike(ours([IMAGE, IMAGE.rotate(90)]), theirs([IMAGE, IMAGE.rotate(90)]))
    features = pair(
        "image-feature-extraction", "FeatureExtraction", tmp_path / "m", original.vit, image_processor=1
    )
    np.testing.assert_allclose(*(pipeline(IMAGE) for pipeline in features), atol=1e-4)


def test_audio_classification(tmp_path: Path) -> None:
    original = save(
        transformers.HubertForSequenceClassification(transformers.HubertConfig(**SPEECH, **NAMED)),
        tmp_path / "m",
    )
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "m")
    ours, theirs = pair(
        "audio-classification", "AudioClassification", tmp_path / "m", original, feature_extractor=1
    )
    alike(ours(SOUND), theirs(SOUND))


def test_semantic_segmentation(tmp_path: Path) -> None:
    config = transformers.SegformerConfig(
        **{"hidden_sizes": [16, 32, 48, 64], "depths": [1] * 4, "num_attention_heads": [1, 2, 3, 4]},
        **{"decoder_hidden_size": 32, **NAMED},
    )
    original = save(transformers.SegformerForSemanticSegmentation(config), tmp_path / "m")
    size = {"height": 64, "width": 64}
    transformers.SegformerImageProcessorPil(size=size).save_pretrained(tmp_path / "m")
    ours, theirs = pair(
        "image-segmentation", "SemanticSegmentation", tmp_path / "m", original, image_processor=1
    )
    found, expected = ours(IMAGE), theirs(IMAGE)
    assert [part["label"] for part in found] == [part["label"] for part in expected]
    for one, other in zip(found, expected, strict=True):
        assert np.mean(np.asarray(one["mask"]) != np.asarray(other["mask"])) < 0.01


def test_depth_estimation(tmp_path: Path) -> None:
    config = transformers.DPTConfig(
        **{
            **SMALL,
            "num_hidden_layers": 4,
            "image_size": 32,
            "patch_size": 8,
            "backbone_out_indices": [0, 1, 2, 3],
        },
        **{"neck_hidden_sizes": [8, 16, 24, 32], "fusion_hidden_size": 16, "is_hybrid": False},
    )
    original = save(transformers.DPTForDepthEstimation(config), tmp_path / "m")
    size = {"height": 32, "width": 32}
    transformers.DPTImageProcessorPil(size=size).save_pretrained(tmp_path / "m")
    ours, theirs = pair("depth-estimation", "DepthEstimation", tmp_path / "m", original, image_processor=1)
    np.testing.assert_allclose(
        *(pipeline(IMAGE)["predicted_depth"] for pipeline in (ours, theirs)), rtol=1e-3, atol=1e-4
    )


def test_frames_of_sound_are_classified_without_a_pipeline(tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(**SPEECH, **NAMED)
    original = save(transformers.Wav2Vec2ForAudioFrameClassification(config), tmp_path / "m")
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "m")
    model = opened("AudioFrameClassification", tmp_path / "m")
    values = torch.from_numpy(SOUND)[None]
    with torch.no_grad():
        expected = original(values)
    found = model(values)
    assert type(found) is type(expected)
    np.testing.assert_allclose(found.logits, expected.logits, atol=1e-4)


def test_speech_recognition_by_ctc(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    letters = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefgh"]
    (folder / "vocab.json").write_text(json.dumps({letter: i for i, letter in enumerate(letters)}))
    transformers.Wav2Vec2CTCTokenizer(str(folder / "vocab.json")).save_pretrained(folder)
    transformers.Wav2Vec2FeatureExtractor().save_pretrained(folder)
    config = transformers.Wav2Vec2Config(**SPEECH, vocab_size=len(letters), pad_token_id=0)
    original = save(transformers.Wav2Vec2ForCTC(config), folder)
    ours, theirs = pair(
        "automatic-speech-recognition", "CTC", folder, original, tokenizer=1, feature_extractor=1
    )
    found = ours(SOUND, return_timestamps="word")
    assert found == theirs(SOUND, return_timestamps="word")
    assert found["text"]


def test_what_an_artifact_has_no_use_for_is_named(classifier: tuple[Path, Any], tmp_path: Path) -> None:
    kind, (folder, _) = infer.InferModelForSequenceClassification, classifier
    model = opened("SequenceClassification", folder)
    ids = torch.ones((1, 4), dtype=torch.int64)
    with pytest.raises(InputError, match="has no use for 'output_attentions'"):
        model(input_ids=ids, output_attentions=True)
    with pytest.raises(InputError, match="has no use for 'labels'"):
        model(ids, labels=torch.tensor([1]))
    with pytest.raises(UsageError, match="no option named 'quantt'.*Did you mean quant"):
        kind.from_pretrained(folder, export=True, quantt="int8")
    with pytest.raises(UsageError, match="not an artifact of infer.*export=True"):
        kind.from_pretrained(folder)
    with pytest.raises(UsageError, match="no option of an artifact is named 'quant'"):
        kind.from_pretrained(model.predictor.path, quant="int8")
    with pytest.raises(UsageError, match="is a classification model"):
        infer.InferModelForMaskedLM.from_pretrained(model.predictor.path)
    with pytest.raises(UsageError, match="precision of an artifact is fixed"):
        model.to(torch.float16)


def test_an_artifact_is_made_once_and_saved_as_a_folder(classifier: tuple[Path, Any], tmp_path: Path) -> None:
    folder, _ = classifier
    first, second = (opened("SequenceClassification", folder) for _ in range(2))
    assert first.predictor.path == second.predictor.path
    pipeline = transformers.pipeline(
        "text-classification", model=first, tokenizer=str(first.predictor.path), device="cpu"
    )
    pipeline.save_pretrained(tmp_path / "saved")  # the tokenizer too
    again = infer.InferModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    same = transformers.pipeline(
        "text-classification", model=again, tokenizer=str(tmp_path / "saved"), device="cpu"
    )
    assert same(TEXTS) == pipeline(TEXTS)


def test_infer_does_not_import_transformers(run_python: Any) -> None:
    script = "import infer, sys; print({'transformers', 'optimum', 'torch'} & set(sys.modules))"
    assert run_python(script).strip() == "set()"
