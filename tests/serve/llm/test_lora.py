"""LoRA adapters over HTTP: an adapter is requested as a model and affects no other request."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

pytest.importorskip("transformers")

from infer import Predictor
from infer.cli import main
from infer.errors import SourceError, UsageError
from infer.options.values import parse_folders
from infer.serve.served_model import ServedModel
from infer.serve.service import Service
from tests.llm.test_lora import peft
from tests.support.fake_predictors import Live, live
from tests.support.llm_artifacts import tiny

pytestmark = pytest.mark.filterwarnings("ignore")  # the exporter has many to give
PROMPT = [5, 6, 7, 8]
QUERIES = {f"model.layers.{i}.self_attn.q_proj": (64, 64) for i in range(2)}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("adapters")
    return {name: peft(home / name, QUERIES, seed=i) for i, name in enumerate(["pirate", "poet"])}


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Predictor]:
    artifact = tiny(tmp_path_factory.mktemp("lora"), speaks=True, adapters="2:4")
    with Predictor.load(artifact, kv_memory="8MiB", adapters=folders) as predictor:
        yield predictor


@pytest.fixture(scope="module")
def server(predictor: Predictor) -> Iterator[Live]:
    with live(predictor) as server:
        yield server


@pytest.mark.parametrize("adapter", [None, "pirate", "poet"])
def test_adapter_requested_as_model_matches_python(
    client: openai.OpenAI, predictor: Predictor, adapter: str | None
) -> None:
    asked = {"max_tokens": 12, "temperature": 0}
    expected = predictor.generate([PROMPT], adapter=adapter, ignore_eos=True, **asked)[0]
    made = client.completions.create(
        model=adapter or predictor.name, prompt=PROMPT, extra_body={"ignore_eos": True}, **asked
    )
    assert made.choices[0].text == expected.text
    assert made.model == (adapter or predictor.name)
    plain = predictor.generate([PROMPT], ignore_eos=True, **asked)[0]
    assert (expected.token_ids == plain.token_ids) == (adapter is None)


def test_adapter_chat_differs_from_base_model_chat(client: openai.OpenAI, predictor: Predictor) -> None:
    said = [{"role": "user", "content": "hello"}]
    answers = [
        client.chat.completions.create(
            model=name, messages=said, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
        )
        for name in (predictor.name, "pirate", "pirate")
    ]
    first, second, third = (answer.choices[0].message.content for answer in answers)
    assert first != second == third


def test_adapters_are_listed_with_their_base_model(client: openai.OpenAI, predictor: Predictor) -> None:
    found = {model.id: model.model_extra["parent"] for model in client.models.list()}
    assert found == {predictor.name: None, "pirate": predictor.name, "poet": predictor.name}
    assert client.models.retrieve("poet").model_extra["parent"] == predictor.name


def test_unknown_adapter_error_lists_the_served_models(
    client: openai.OpenAI,
) -> None:
    with pytest.raises(openai.NotFoundError, match="pirate, poet"):
        client.completions.create(model="sailor", prompt=PROMPT)


def test_adapter_with_its_models_name_is_refused(predictor: Predictor) -> None:
    class Named:
        def __getattr__(self, name: str) -> object:
            return ["tiny"] if name == "adapter_names" else getattr(predictor.language_model, name)

    model = ServedModel.of(predictor)
    model.language_model = Named()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="name collision"):
        Service([model])


def test_folder_without_adapter_is_refused_at_load(predictor: Predictor, tmp_path: Path) -> None:
    with pytest.raises(SourceError):
        Predictor.load(predictor.path, adapters={"nothing": tmp_path})


@pytest.mark.parametrize("given", [["style"], ["=x"], ["a=x", "a=y"]])
def test_adapter_options_need_unique_names_and_folders(given: list[str]) -> None:
    with pytest.raises(UsageError, match="NAME=FOLDER"):
        parse_folders(given)
    assert main(["serve", "nowhere.infer", *(part for one in given for part in ("--lora", one))]) == 2
