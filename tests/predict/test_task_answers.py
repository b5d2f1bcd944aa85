"""Each task from a Hugging Face folder to an answer: the artifact gives what transformers' pipeline gives."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image

from infer import Plan, Predictor, optimize
from infer.errors import InputError, UsageError
from tests.support.fake_predictors import live
from tests.support.tiny_heads import LABELS, SMALL, TEXTS, WORDS, bert, save, save_tokenizer

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # transformers and the exporter have many to give


def made(folder: Path, data: Path, **options: Any) -> Predictor:
    plan = Plan(source=str(folder), data=str(data), **{"backend": "eager", "batches": (), **options})
    return Predictor.load(optimize(plan, folder.with_suffix(".infer"), replace=True).path)


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.txt"
    path.write_text("\n\n".join(TEXTS))
    return path


@pytest.fixture
def images(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "images"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for index, size in enumerate(((40, 60), (70, 50), (48, 48), (90, 64))):
        noise = generator.integers(0, 256, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(folder / f"{index}.png")
    return folder


def closes(found: list[dict[str, Any]], expected: list[dict[str, Any]], name: str = "label") -> None:
    assert [row[name] for row in found] == [row[name] for row in expected]
    np.testing.assert_allclose([r["score"] for r in found], [r["score"] for r in expected], atol=1e-4)


def test_token_classification_answers_are_entities(tmp_path: Path, texts: Path) -> None:
    model = bert(
        tmp_path / "m", "TokenClassification", id2label=LABELS, label2id={v: k for k, v in LABELS.items()}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    pipeline = transformers.pipeline(
        "token-classification", model=model, tokenizer=tokenizer, aggregation_strategy="simple"
    )
    with made(tmp_path / "m", texts) as predictor:
        assert predictor.task == "token-classification"
        for found, text in zip(predictor.predict(TEXTS), TEXTS, strict=True):
            expected = pipeline(text)
            closes(found, expected, "entity_group")
            assert [(r["start"], r["end"], r["word"]) for r in found] == [
                (r["start"], r["end"], text[r["start"] : r["end"]]) for r in expected
            ]


def test_a_question_is_answered_by_a_span_of_a_long_context(tmp_path: Path, texts: Path) -> None:
    model = bert(tmp_path / "m", "QuestionAnswering")
    question, context = "where is the cat", " ".join([*TEXTS, *reversed(TEXTS), *TEXTS, *TEXTS])
    with made(tmp_path / "m", texts) as predictor:
        assert [spec.name for spec in predictor.outputs] == ["start_logits", "end_logits"]
        found = predictor.predict({"question": question, "context": context})
        assert predictor.predict((question, context)) == found
        assert found["answer"] == context[found["start"] : found["end"]]
        short = predictor.predict((question, TEXTS[1]))
        with pytest.raises(InputError, match="expected a pair of texts"):
            predictor.predict("no pair")
        with pytest.raises(InputError, match="takes all of the 64 tokens"):
            predictor.predict((context, "the cat"))
    rows = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")(
        question, TEXTS[1], return_tensors="pt", return_token_type_ids=True
    )
    types = torch.tensor([[int(i == 1) for i in rows.sequence_ids(0)]])
    types[0, -1] = 1
    with torch.no_grad():
        out = model(rows["input_ids"], attention_mask=rows["attention_mask"], token_type_ids=types)
    kept = [i for i, kind in enumerate(rows.sequence_ids(0)) if kind == 1]
    first, last = (values[0, kept].softmax(-1) for values in (out.start_logits, out.end_logits))
    assert short["score"] == pytest.approx(float(torch.outer(first, last).triu().max()), abs=1e-4)


def test_texts_that_padding_would_change_are_never_padded(tmp_path: Path, texts: Path) -> None:
    """FNet mixes all places of a row by a Fourier transform, and takes no mask."""
    config = transformers.FNetConfig(
        hidden_size=32, num_hidden_layers=1, intermediate_size=48, vocab_size=save_tokenizer(tmp_path / "m"),
        max_position_embeddings=64, type_vocab_size=2, num_labels=3,
    )  # fmt: skip
    save(transformers.FNetForSequenceClassification(config), tmp_path / "m")
    with made(tmp_path / "m", texts) as predictor:
        assert predictor.joins == "equal"
        assert any("only requests of equal lengths are joined" in line for line in predictor.manifest.verdict)
        alone = [predictor.predict(text) for text in TEXTS]
        for found, expected in zip(predictor.predict(TEXTS), alone, strict=True):
            closes(found, expected)
        with live(predictor) as server:
            rows = {"inputs": [[text] for text in TEXTS]}
            asked = httpx.post(f"{server.url}/predict", json=rows, timeout=30).json()
    for found, expected in zip(asked, alone, strict=True):
        closes(found, expected)


def test_fill_mask_answers_are_ranked_tokens(tmp_path: Path, texts: Path) -> None:
    model = bert(tmp_path / "m", "MaskedLM")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    pipeline = transformers.pipeline("fill-mask", model=model, tokenizer=tokenizer)
    with made(tmp_path / "m", texts) as predictor:
        assert predictor.task == "fill-mask"
        text = "the [MASK] sat on a mat"
        (found,) = predictor.predict(text)
        closes(found, pipeline(text), "token_str")
        assert found[0]["sequence"] == text.replace("[MASK]", found[0]["token_str"])
        with pytest.raises(InputError, match=r"expected a text with \[MASK\]"):
            predictor.predict(TEXTS[0])
        with live(predictor) as server:
            two = "[MASK] cat sat on [MASK]"
            for inputs, parameters in (
                (text, {}),
                ([text, two, "a dog [MASK]"], {"top_k": 3}),
                (text, {"targets": ["dog", "mat", "cat"], "top_k": 2}),
            ):
                asked = {"inputs": inputs, "parameters": parameters}
                served = httpx.post(f"{server.url}/predict", json=asked, timeout=60).json()
                alike(served, pipeline(inputs, **parameters))


def alike(found: Any, expected: Any) -> None:
    """Compare nested lists of answers: scores nearly, all else exactly."""
    if isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            alike(one, other)
    else:
        assert found == {**expected, "score": pytest.approx(expected["score"], abs=1e-4)}


def test_entities_without_aggregation_are_those_of_transformers(tmp_path: Path, texts: Path) -> None:
    model = bert(tmp_path / "m", "TokenClassification", id2label=LABELS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    given = {"aggregation_strategy": "none", "ignore_labels": ["B-LOC"]}
    pipeline = transformers.pipeline("token-classification", model=model, tokenizer=tokenizer, **given)
    with made(tmp_path / "m", texts) as predictor, live(predictor) as server:
        asked = {"inputs": TEXTS, "parameters": given}
        alike(httpx.post(f"{server.url}/predict", json=asked, timeout=60).json(), pipeline(TEXTS))


@pytest.mark.parametrize(
    ("kind", "raw", "body"),
    [
        ("TokenClassification", "The Cat sat", {"inputs": "The Cat sat"}),
        ("MaskedLM", "The Cat [MASK] on a Mat", {"inputs": "The Cat [MASK] on a Mat"}),
        (
            "QuestionAnswering",
            ("Where is it", "The Dog ran far Away"),
            {"inputs": {"question": "Where is it", "context": "The Dog ran far Away"}},
        ),
        ("SequenceClassification", "The Cat sat", {"inputs": "The Cat sat"}),
        (
            "SequenceClassification",
            {"text": "The Cat sat", "candidate_labels": ["Dog", "Mat"], "multi_label": True},
            {
                "inputs": "The Cat sat",
                "parameters": {"candidate_labels": ["Dog", "Mat"], "multi_label": True},
            },
        ),
    ],
)
def test_the_server_answers_as_the_predictor_does(
    tmp_path: Path, texts: Path, kind: str, raw: Any, body: dict[str, Any]
) -> None:
    labels = {0: "entailment", 1: "neutral", 2: "contradiction"}
    named = {"TokenClassification": LABELS, "SequenceClassification": labels}.get(kind)
    bert(tmp_path / "m", kind, **({"id2label": named} if named else {}))
    with made(tmp_path / "m", texts) as predictor:
        predictor.manifest.meta["lower_case"] = True  # as of a model that was trained so
        found = predictor.answer(raw)
        lowered = raw.lower().replace("[mask]", "[MASK]") if isinstance(raw, str) else None
        if lowered is not None and kind != "TokenClassification":
            alike(found, predictor.answer(lowered))
        with live(predictor) as server:
            served = httpx.post(f"{server.url}/predict", json=body, timeout=60).json()
        alike(served, found[0] if kind == "MaskedLM" else found)


@pytest.mark.parametrize("kind", ["Bert", "Roberta"])
def test_choices_have_the_scores_of_transformers(tmp_path: Path, kind: str) -> None:
    folder, question, choices = (
        tmp_path / "m",
        "where is the cat",
        ["on a mat", "far away and not there", "it ran"],
    )
    config = getattr(transformers, f"{kind}Config")(
        **SMALL,
        vocab_size=save_tokenizer(folder),
        max_position_embeddings=64,
        pad_token_id=0,
        type_vocab_size=2 if kind == "Bert" else 1,
    )
    model = save(getattr(transformers, f"{kind}ForMultipleChoice")(config), folder)
    data = tmp_path / "texts.txt"
    data.write_text("\n\n".join([*TEXTS, "the dog sat", "a cat ran far"]))
    rows = transformers.AutoTokenizer.from_pretrained(folder)(
        [question] * 3, choices, padding=True, return_tensors="pt"
    )
    types = [one.type_ids for one in rows.encodings]
    taken = {"input_ids": rows["input_ids"][None], "attention_mask": rows["attention_mask"][None]}
    taken |= {"token_type_ids": torch.tensor(types)[None]} if kind == "Bert" else {}
    with torch.no_grad():
        scores = model(**taken).logits[0].softmax(-1)
    expected = sorted(({"label": c, "score": float(s)} for c, s in zip(choices, scores, strict=True)),
                      key=lambda one: -one["score"])  # fmt: skip
    with made(folder, data, quant="none") as predictor:
        assert predictor.task == "multiple-choice"
        alike(predictor.predict({"question": question, "choices": choices}), expected)
        alike(predictor.predict([(question, *choices), (question, *choices[:2])])[0], expected)
        with pytest.raises(InputError, match="expected a question and at least two choices"):
            predictor.predict((question, choices[0]))
        with live(predictor) as server:
            asked = {"inputs": {"question": question, "choices": choices}, "parameters": {"top_k": 2}}
            alike(httpx.post(f"{server.url}/predict", json=asked, timeout=60).json(), expected[:2])


def test_a_quantized_choice_is_judged_by_question(tmp_path: Path) -> None:
    folder, data = tmp_path / "m", tmp_path / "texts.txt"
    wide = {**SMALL, "hidden_size": 64}
    config = transformers.BertConfig(**wide, vocab_size=save_tokenizer(folder), max_position_embeddings=64)
    save(transformers.BertForMultipleChoice(config), folder)
    data.write_text("\n\n".join(" ".join(WORDS[i : i + 4]) for i in range(12)))
    with made(folder, data, quant="int8:weight", max_batch=3, allow_slower=True) as predictor:
        found = {
            one["metric"]: one["value"] for one in predictor.report["fidelity"] if one["subject"] == "logits"
        }
    assert found["rows"] == 6  # every second of twelve questions
    assert found["top1"] >= 0.98


def test_texts_and_pairs_are_classified_with_scores(tmp_path: Path, texts: Path) -> None:
    labels = {0: "no", 1: "perhaps", 2: "yes"}
    model = bert(
        tmp_path / "m", "SequenceClassification", id2label=labels, label2id={v: k for k, v in labels.items()}
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    pipeline = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, top_k=None)
    with made(tmp_path / "m", texts) as predictor:
        closes(predictor.predict(TEXTS[0]), pipeline([TEXTS[0]])[0])
        found = predictor.predict([TEXTS[1], (TEXTS[0], TEXTS[2])])
        closes(found[0], pipeline([TEXTS[1]])[0])
        assert sum(row["score"] for row in found[1]) == pytest.approx(1)


@pytest.mark.parametrize(
    ("kind", "quant", "backend"),
    [
        ("vit", "none", "eager"),
        ("vit", "int8", "ort"),
        ("convnext", "none", "ort"),
        ("convnext", "int8", "eager"),
    ],
)
def test_an_image_is_classified(tmp_path: Path, images: Path, kind: str, quant: str, backend: str) -> None:
    folder, labels = tmp_path / "m", {0: "cat", 1: "dog", 2: "mat"}
    named = {"id2label": labels, "label2id": {v: k for k, v in labels.items()}, "image_size": 32}
    if kind == "vit":
        config = transformers.ViTConfig(**{**SMALL, "hidden_size": 64}, patch_size=8, **named)
        model = save(transformers.ViTForImageClassification(config), folder)
        processor = transformers.ViTImageProcessorPil(size={"height": 32, "width": 32})
    else:
        config = transformers.ConvNextConfig(hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1], **named)
        model = save(transformers.ConvNextForImageClassification(config), folder)
        processor = transformers.ConvNextImageProcessorPil(size={"shortest_edge": 32})
    processor.save_pretrained(folder)
    files = sorted(images.iterdir())
    with made(folder, images, backend=backend, quant=quant, allow_slower=True) as predictor:
        assert [spec.format() for spec in predictor.inputs] == ["pixel_values=float32[batch,3,32,32]"]
        found = predictor.predict(list(files))
        if quant == "none":
            closes(predictor.predict(str(files[0])), found[0])
    with torch.no_grad():
        pixels = processor(images=[Image.open(file) for file in files], return_tensors="pt")
        scores = model(**pixels).logits.softmax(-1)
    for answer, expected in zip(found, scores, strict=True):
        got = {row["label"]: row["score"] for row in answer}
        want = {labels[i]: float(value) for i, value in enumerate(expected)}
        assert got == pytest.approx(want, abs=1e-4 if quant == "none" else 0.05)


def test_an_image_is_compared_with_texts(tmp_path: Path, images: Path) -> None:
    folder, labels = tmp_path / "m", ["cat", "dog on a mat", "it"]
    tiny = {**SMALL, "hidden_size": 64}
    text = {**tiny, "vocab_size": save_tokenizer(folder), "max_position_embeddings": 24}
    text |= {"pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 3}
    config = transformers.CLIPConfig(
        text_config=text, vision_config={**tiny, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    model = save(transformers.CLIPModel(config), folder)
    processor = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}
    )
    processor.save_pretrained(folder)
    pipeline = transformers.pipeline(
        "zero-shot-image-classification", model=model, image_processor=processor,
        tokenizer=transformers.AutoTokenizer.from_pretrained(folder),
    )  # fmt: skip
    file = sorted(images.iterdir())[0]
    with pytest.raises(
        InputError, match=r"at least two texts.*Put a .txt file beside the images, one text a line"
    ):
        made(folder, images)
    (images / "texts.txt").write_text("\n".join(TEXTS))
    expected = pipeline(Image.open(file), candidate_labels=labels)
    other = pipeline(Image.open(file), candidate_labels=labels, hypothesis_template="the {} ran")
    with made(folder, images) as predictor:
        alike(predictor.predict({"image": str(file), "candidate_labels": labels}), expected)
        alike(predictor.predict([(Image.open(file), *labels)]), [expected])
        with pytest.raises(InputError, match="expected an image and candidate_labels"):
            predictor.predict(str(file))
        with live(predictor) as server:
            data, url = base64.b64encode(file.read_bytes()).decode(), f"{server.url}/predict"
            given = {"candidate_labels": labels, "hypothesis_template": "the {} ran", "top_k": 2}
            alike(httpx.post(url, json={"inputs": data, "parameters": given}, timeout=60).json(), other[:2])
            form = {"candidate_labels": labels}
            alike(httpx.post(url, data=form, files={"file": file.read_bytes()}, timeout=60).json(), expected)
            answer = httpx.post(url, json={"inputs": data}, timeout=60)
            assert (answer.status_code, "at least two texts" in answer.text) == (400, True)


def test_without_preprocessing_the_artifact_takes_tensors_and_says_why(tmp_path: Path, images: Path) -> None:
    config = transformers.ViTConfig(**SMALL, patch_size=8, image_size=16)
    save(transformers.ViTForImageClassification(config), tmp_path / "m")
    with made(tmp_path / "m", "random") as predictor:  # type: ignore[arg-type]
        assert predictor.predict(np.zeros((1, 3, 16, 16), np.float32)).shape == (1, 2)
        with pytest.raises(UsageError, match="takes tensors only: its folder had no preprocessing"):
            predictor.predict(str(images / "0.png"))
