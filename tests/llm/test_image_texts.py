"""Models that write text about an image give what transformers' `generate` gives, from source to server."""

from __future__ import annotations

import base64
import io
import itertools
import json
from pathlib import Path
from typing import Any

import anthropic
import httpx
import numpy as np
import openai
import pytest
from PIL import Image

from bench.models.image_text_configs import (
    END,
    NAMES,
    QUESTION,
    SIDE,
    WITH_QUESTION,
    build,
    greedy,
    save,
)
from infer import Plan, Predictor, load, optimize
from infer.errors import InputError
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import Sampling
from infer.llm.request_streams import complete
from infer.llm.step.encoder_decoder.encoder_decoder_probe import probe_encoder_decoder
from infer.tasks.image_text import ImageSource
from tests.support.fake_predictors import live

COUNT = 20


def pictures() -> list[Image.Image]:
    """Return two pictures of other sizes than the model's."""
    noise = np.random.default_rng(0).integers(0, 256, (2, 48, 60, 3), dtype=np.uint8)
    return [Image.fromarray(one) for one in noise]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def wanted(
    source: Path, image: Image.Image, prompt: list[int] | None = None, question: list[int] | None = None
) -> list[int]:
    """Return the greedy tokens of transformers after those that the decoder begins with."""
    import transformers

    [kind] = json.loads((source / "config.json").read_text())["architectures"]
    model = getattr(transformers, kind).from_pretrained(source)
    processor: Any = transformers.ViTImageProcessor.from_pretrained(source)
    return greedy(model, processor(image, return_tensors="pt").pixel_values, COUNT, prompt, question)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the artifacts of a reader of documents and of a captioner; their sources lie beside them."""
    folder = tmp_path_factory.mktemp("image_texts")
    plan = {"backend": "eager", "batches": (), "data": "random", "kv_dtype": "float32", "allow_slower": True}
    return {
        name: optimize(
            Plan(source=str(save(build(name), folder / name)), **plan), folder / f"{name}.infer"
        ).path  # type: ignore[arg-type]
        for name in ("donut", "blip", *WITH_QUESTION)
    }


NUMBERS = itertools.count()


def tokens_of(predictor: Predictor, image: Image.Image, prompt: list[int] | None = None) -> list[int]:
    source = predictor.language_model.shape.source
    assert source is not None
    pixels = predictor.media.tensors([image])["pixel_values"][0]
    request = Request(
        id=f"image-{next(NUMBERS)}",  # an engine may still hold the one before
        prompt=list(source.start_ids) if prompt is None else prompt,
        sampling=Sampling(temperature=0, max_tokens=COUNT),
        features=pixels.tobytes(),
    )
    [[found]] = complete(predictor.engine_client, [request])
    return list(found.token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_every_pair_of_encoder_and_decoder_runs_as_a_step(name: str) -> None:
    """The probe compares the logits of two images, step by step, with those of transformers' own forward."""
    from infer.load.heads import build as build_model

    own: Any = build(name)
    model: Any = build_model(type(own), own.config)
    model.load_state_dict(own.state_dict(), strict=False)
    shape = probe_encoder_decoder(model.eval(), [END], kv_dtype="float32", image=(3, SIDE, SIDE))
    assert shape.source is not None
    assert shape.source.features == (3, SIDE, SIDE)


@pytest.mark.parametrize("name", ["donut", "blip"])
def test_greedy_tokens_about_an_image_equal_transformers(name: str, made: dict[str, Path]) -> None:
    with Predictor.load(made[name]) as predictor:
        for image in pictures():
            found = tokens_of(predictor, image)
            assert found == wanted(made[name].with_suffix(""), image)
        assert len({tuple(tokens_of(predictor, image)) for image in pictures()}) == 2


def test_a_predictor_answers_with_the_text_of_an_image(made: dict[str, Path]) -> None:
    with Predictor.load(made["blip"]) as predictor:
        first, second = pictures()
        both = predictor.predict([png(first), second])
        assert [set(one) for one in both] == [{"generated_text"}] * 2
        assert predictor.answer(first) == both[0]
        text = predictor.language_model.decode(tokens_of(predictor, first))
        assert both[0]["generated_text"].startswith(text.strip()[:8])
        with pytest.raises(InputError, match="expected an image"):
            predictor.generate("a picture of")


def test_a_prompt_of_donut_stands_in_place_of_its_first_token(made: dict[str, Path]) -> None:
    with Predictor.load(made["donut"]) as predictor:
        prompt, image = predictor.language_model.encode("qa", special=False), pictures()[0]
        found = predictor.answer({"image": image, "text": "qa"})["generated_text"]
        tokens = wanted(made["donut"].with_suffix(""), image, prompt)
        assert found.startswith(predictor.language_model.decode(tokens).strip()[:8])


@pytest.mark.parametrize("name", WITH_QUESTION)
def test_answers_to_questions_about_an_image_equal_transformers(name: str, made: dict[str, Path]) -> None:
    """The encoder reads the question beside the image: another question gives another answer."""
    questions = [QUESTION, QUESTION[::-1] + [66, 67]]
    with Predictor.load(made[name]) as predictor:
        for image, question in zip(pictures(), questions, strict=True):
            found = tokens_of(predictor, image, question)
            assert found == wanted(made[name].with_suffix(""), image, question=question)
        first, second = (tokens_of(predictor, pictures()[0], one) for one in questions)
        assert first != second


def test_a_task_token_of_florence_stands_for_its_sentence(made: dict[str, Path]) -> None:
    with Predictor.load(made["florence2"]) as predictor:
        image = pictures()[0]
        found = predictor.answer({"image": image, "text": "<CAPTION>"})
        assert found == predictor.answer((image, "What does the image describe?"))
        source = ImageSource.of(predictor.manifest.meta)
        assert source is not None
        assert source.text("<OPEN_VOCABULARY_DETECTION> a cat", "text") == "Locate a cat in the image."
        assert source.text("a cat", "text") == "a cat"
        assert not source.greedy([], 64).skip_special_tokens  # places are special tokens
        assert source.answer("</s><s>car<loc_1><loc_2></s>") == {"generated_text": "car<loc_1><loc_2>"}
        with pytest.raises(InputError, match="takes no text beside it"):
            predictor.answer((image, "<OD> cats"))


def test_samples_of_images_and_questions_are_read_from_a_folder(
    made: dict[str, Path], tmp_path: Path
) -> None:
    for index, image in enumerate(pictures()):
        image.save(tmp_path / f"{index}.png")
    plan = Plan(source=str(made["blip-vqa"].with_suffix("")), data=str(tmp_path))
    with pytest.raises(InputError, match="expected a text beside the images"):
        load.load(plan)
    (tmp_path / "questions.txt").write_text("who is it\nwhat is there\n")
    loaded = load.load(plan)
    assert list(loaded.samples) == ["pixel_values", "input_ids", "decoder_input_ids"]
    assert loaded.samples["input_ids"].shape[0] == 2


def test_samples_of_images_have_the_tokens_that_the_model_writes(
    made: dict[str, Path], tmp_path: Path
) -> None:
    for index, image in enumerate(pictures()):
        image.save(tmp_path / f"{index}.png")
    loaded = load.load(Plan(source=str(made["blip"].with_suffix("")), data=str(tmp_path)))
    assert set(loaded.samples) == {"pixel_values", "decoder_input_ids"}
    ours = loaded.samples["decoder_input_ids"][0].tolist()[1 : COUNT + 1]
    assert ours == wanted(made["blip"].with_suffix(""), pictures()[0])[: len(ours)]


def test_images_are_described_over_http_as_clients_ask(made: dict[str, Path], monkeypatch: Any) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    image = png(pictures()[0])
    url = f"data:image/png;base64,{base64.b64encode(image).decode()}"
    with Predictor.load(made["blip"]) as predictor:
        text = predictor.answer(image)["generated_text"]
        with live(predictor) as server, httpx.Client(base_url=server.url, timeout=30) as client:
            inference = hub.InferenceClient(model=f"{server.url}/predict", timeout=30)
            assert inference.image_to_text(image).generated_text == text
            both = client.post("/predict", json={"inputs": [url, url]}).json()
            assert both == [[{"generated_text": text}]] * 2
            form = client.post("/predict", files={"file": ("a.png", image)}).json()
            assert form == [{"generated_text": text}]
            chat = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
            part: Any = {"type": "image_url", "image_url": {"url": url}}
            messages: Any = [{"role": "user", "content": [part]}]
            answer = chat.chat.completions.create(model=predictor.name, messages=messages, max_tokens=56)
            assert (answer.choices[0].message.content or "").strip()[:8] == text[:8]
            part = {"type": "input_image", "image_url": url, "detail": "auto"}
            items: Any = [{"role": "user", "content": [part]}]
            response = chat.responses.create(model=predictor.name, input=items, max_output_tokens=56)
            assert response.output_text.strip()[:8] == text[:8]
            source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
            messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
            with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude:
                message = claude.messages.create(model=predictor.name, messages=messages, max_tokens=56)
            assert message.content[0].text.strip()[:8] == text[:8]  # type: ignore[union-attr]
            items[0]["content"][0]["image_url"] = "http://127.0.0.1:1/a.png"
            with pytest.raises(openai.BadRequestError, match="addresses are not fetched") as caught:
                chat.responses.create(model=predictor.name, input=items)
            assert caught.value.param == "input[0].content"
            refused = client.post("/v1/chat/completions", json={
                "model": predictor.name, "messages": [{"role": "user", "content": "hello"}],
            })  # fmt: skip
            assert refused.status_code == 400
            assert "image_url" in refused.text
            wrong = client.post("/v1/audio/transcriptions", files={"file": ("a.wav", b"x")})
            assert wrong.status_code == 404
