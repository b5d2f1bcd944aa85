"""One definition of sampling options: each comes the same way through Python, the command line and OpenAI's routes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
import typer

from infer.cli import application, main
from infer.errors import InputError, UsageError
from infer.llm.engine.requests import Request
from infer.llm.engine.sampling.sampling_options import OPTIONS, SERVED_MAXIMUM, Sampling, bounds
from infer.llm.llm import LanguageModel
from infer.llm.text.generation_config import GenerationConfig
from infer.predict import isolated_open
from infer.predict.generation_options import Options
from infer.predict.predictor import Predictor
from infer.predict.text_generation import TextGeneration
from infer.serve.api.openai import completions, openai_request
from infer.serve.api.openai.chat_types import ChatRequest
from infer.serve.api.openai.openai_types import CompletionRequest
from infer.serve.generation.engine_request import complete_sampling
from infer.serve.generation.request_fields import OPTION_NAMES, read_request

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
# One value for each option that is not its default, in Python; a new option needs one too.
VALUES: dict[str, Any] = {
    "max_tokens": 7,
    "min_tokens": 3,
    "temperature": 0.7,
    "top_k": 40,
    "top_p": 0.9,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {5: 2.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["no", "not at all"],
    "seed": 11,
    "stop": ["END", "\n\n"],
    "stop_token_ids": [4, 5],
    "include_stop": True,
    "skip_special_tokens": False,
    "ignore_eos": True,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "n": 3,
    "priority": -4,
    "adapter": "style",
    "src_lang": "deu_Latn",
    "tgt_lang": "fra_Latn",
    "json_schema": SCHEMA,
    "json_object": True,
    "regex": "a+",
    "choice": ["yes", "no"],
    "grammar": 'start: "yes" | "no"',
}
# Bodies of /v1/completions where the option is not simply a field; the adapter is chosen by the model's name.
BODIES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {"5": 2.0}},
    "prompt_logprobs": {"logprobs": 2, "echo": True},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "a+"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"guided_grammar": 'start: "yes" | "no"'},
}
ON_COMMAND_LINE = [
    *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed", "stop", "n"),
    *("logprobs", "ignore_eos", "json_schema", "regex", "choice", "src_lang", "tgt_lang"),
]
RANGED = [n for n, f in OPTIONS.items() if f.option.maximum is not None]
VOCABULARY = 5000


class LanguageStub:
    """A language model of which only the options are asked."""

    config = GenerationConfig()
    context = 1 << 31
    vocab_size = VOCABULARY
    start_tokens = 0
    sampling = LanguageModel.sampling

    def check_grammar(self, _: Any) -> None: ...

    class text:
        @staticmethod
        def translated(ids: list[int], source: str | None, target: str | None) -> Any:
            return [8, *ids] if source else ids, 9 if target else None


def in_python(**options: Any) -> Request:
    """Return what `Predictor.generate` asks of the engine."""
    predictor = TextGeneration.__new__(TextGeneration)
    predictor._language_model = LanguageStub()  # type: ignore[assignment]
    made = predictor._request([1], options)  # type: ignore[arg-type]
    made.sampling.check(VOCABULARY)
    return made


def over_http(kind: type[Any] = CompletionRequest, **fields: Any) -> Request:
    """Return what a request of an OpenAI route asks of the engine."""
    fields = {"model": "m", "prompt": "x", **fields}
    if kind is ChatRequest:
        fields = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, **fields}
    body = json.loads(json.dumps(fields))
    call = SimpleNamespace(value=lambda: body, headers={"content-type": "application/json"})
    call.header = lambda name, default=None: call.headers.get(name, default)
    request, _ = read_request(call, kind)  # type: ignore[arg-type]
    model: Any = SimpleNamespace(language_model=LanguageStub(), vocab_size=VOCABULARY)
    prompt, forced = [1], None
    if isinstance(request, CompletionRequest):
        limit = 256 if request.max_tokens is None else request.max_tokens
        model.context, model.start_tokens = limit + 1, 0
        options = completions.completion_options(request, model, prompt) | {"max_tokens": limit}
        prompt, forced = model.language_model.text.translated(prompt, request.src_lang, request.tgt_lang)
    else:
        options = openai_request.sampling_options(request) | {"logprobs": request.logprobs}
    sampling = complete_sampling(model, options)
    grammar, _ = openai_request.grammar(request)
    return Request(
        id="",
        prompt=prompt,
        sampling=sampling,
        priority=request.priority or 0,
        grammar=grammar,
        forced_bos_token_id=forced,
    )


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function: words of a command → the options with which it calls the predictor."""
    seen: list[dict[str, Any]] = []

    class Stub:
        language = LanguageStub()

        def __enter__(self) -> Stub:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def generate(self, _: str, **options: Any) -> Any:
            seen.append(options)
            return []

    class Session:
        def __init__(self, _: Any, __: Any, options: dict[str, Any]) -> None:
            seen.append(options)

        def run(self) -> None: ...

    monkeypatch.setattr(Predictor, "load", lambda *_, **__: Stub())
    monkeypatch.setattr(isolated_open, "open_in_subprocess", lambda *_, **__: None)
    monkeypatch.setattr("infer.cli.chat_session.ChatSession", Session)

    def run(command: str, *words: str) -> dict[str, Any]:
        seen.clear()
        assert main([command, "model.infer", *(["x"] if command == "generate" else []), *words]) == 0
        return seen[0]

    return run


def words(name: str, folder: Path) -> list[str]:
    """Return the words that give an option its value of `VALUES`."""
    field, value = OPTIONS[name], VALUES[name]
    if value is True:
        return [field.flag]
    if name == "json_schema":
        (folder / "schema.json").write_text(json.dumps(value))
        return [field.flag, str(folder / "schema.json")]
    return [
        word for item in (value if isinstance(value, list) else [value]) for word in (field.flag, str(item))
    ]


def test_every_sampling_option_is_tested_and_a_python_keyword() -> None:
    assert list(VALUES) == list(OPTIONS) == list(Options.__annotations__)
    defaults = {name: field.default for name, field in OPTIONS.items()}
    assert not [name for name, value in VALUES.items() if value == defaults[name]]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_type_of_the_keyword_takes_the_type_of_the_option(name: str) -> None:
    hint, kind = get_type_hints(Options)[name], OPTIONS[name].type
    assert msgspec.convert(VALUES[name], hint if name != "stop" else str | list[str]) == VALUES[name]
    scalars = {one for one in (get_args(kind) or (kind,)) if one in (int, float, bool, str)}
    if OPTIONS[name].plain_type is not None:
        assert scalars <= set(get_args(hint) or (hint,))


@pytest.mark.parametrize("name", OPTIONS)
def test_sampling_options_mean_the_same_in_python_and_http(name: str) -> None:
    made = in_python(**{name: VALUES[name]})
    assert msgspec.structs.replace(made, id="") != msgspec.structs.replace(in_python(), id="")
    if name == "adapter":
        assert made.adapter == "style"
        return
    field = {option: field for field, option in OPTION_NAMES.items() if option == "include_stop"}.get(
        name, name
    )
    sent = over_http(**BODIES.get(name, {field: VALUES[name]}))
    if name == "prompt_logprobs":
        made = in_python(prompt_logprobs=2, logprobs=2)
    assert msgspec.structs.replace(sent, id="") == msgspec.structs.replace(made, id="")


@pytest.mark.parametrize("name", ON_COMMAND_LINE)
def test_sampling_flags_mean_the_same_as_python_keywords(name: str, typed: Any, tmp_path: Path) -> None:
    asked = in_python(**{name: VALUES[name]})
    commands = [c for c in ("generate", "chat") if f"--{name.replace('_', '-')}" in flags(c)]
    assert "generate" in commands
    for command in commands:
        made = in_python(**typed(command, *words(name, tmp_path)))
        assert msgspec.structs.replace(made, id="") == msgspec.structs.replace(asked, id="")


def test_absent_sampling_flags_keep_the_models_defaults(typed: Any) -> None:
    assert typed("generate") == typed("chat") == {}


def flags(command: str) -> list[str]:
    return [flag for p in typer.main.get_command(application()).commands[command].params for flag in p.opts]  # type: ignore[attr-defined]


def test_generate_and_chat_have_every_sampling_flag() -> None:
    shared = ["--draft", "--kv-memory", "--max-tokens", "--min-p", "--repetition-penalty", "--seed", "--stop"]
    shared += ["--temperature", "--threads", "--top-k", "--top-p", "--trust-code"]
    shared += [
        "--backend",
        "--data",
        "--dtype",
        "--max-length",
        "--quant",
    ]  # of a source that is optimized first
    own = [
        "--choice",
        "--ignore-eos",
        "--json",
        "--json-schema",
        "--logprobs",
        "--n",
        "--regex",
        "--src-lang",
        "--stream",
        "--tgt-lang",
        "-n",
    ]
    assert sorted(flag for flag in flags("generate") if flag[0] == "-") == sorted([*shared, *own])
    assert sorted(flag for flag in flags("chat") if flag[0] == "-") == sorted(
        [*shared, "--reasoning-form", "--system"]
    )


def outside(name: str, *, served: bool) -> list[float]:
    option = bounds(name, served=served)
    low = option.above if option.minimum is None else option.minimum - 1
    assert low is not None
    assert option.maximum is not None
    values = [low, option.maximum + 1]
    whole = [int(v) if v == int(v) else v for v in values]
    return whole if OPTIONS[name].plain_type is int else [*whole, math.nan]


@pytest.mark.parametrize("name", RANGED)
def test_a_sampling_value_out_of_range_has_one_message(
    name: str, typed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for value in outside(name, served=False):
        with pytest.raises(InputError) as python:
            in_python(**{name: value})
        assert python.value.where == name
        text = python.value.message
        assert text.startswith(f"expected {name} ")
        assert text.endswith(f", got {value}")
        if name in ON_COMMAND_LINE:
            flag = OPTIONS[name].flag
            assert main(["generate", "model.infer", "x", f"{flag}={value}"]) == 2
            assert text.replace(name, flag, 1) in capsys.readouterr().err
        if name in CompletionRequest.__struct_fields__ and not math.isnan(value):
            with pytest.raises(InputError) as http:
                over_http(**{name: value})
            assert http.value.where == name
            assert (http.value.message == text) != (name in SERVED_MAXIMUM)


@pytest.mark.parametrize("name", SERVED_MAXIMUM)
def test_requests_over_http_have_lower_limits(name: str) -> None:
    most = SERVED_MAXIMUM[name]
    assert Sampling(**{name: most + 1}).check(VOCABULARY) is None
    Sampling(**{name: most}).check(VOCABULARY, served=True)
    with pytest.raises(InputError, match=f"expected {name} between . and {most}, got {most + 1}"):
        Sampling(**{name: most + 1}).check(VOCABULARY, served=True)


def test_an_aliased_field_is_named_as_it_was_sent() -> None:
    for field, value in (("top_logprobs", 21), ("max_completion_tokens", -1)):
        with pytest.raises(InputError, match=f"expected {field} between") as caught:
            over_http(ChatRequest, **{field: value})
        assert caught.value.where == field


@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_the_openapi_document_has_the_ranges_of_the_options(kind: type[Any]) -> None:
    _, parts = msgspec.json.schema_components([kind])
    properties = parts[kind.__name__]["properties"]
    checked = 0
    for field, schema in properties.items():
        name = OPTION_NAMES.get(field, field)
        if name not in OPTIONS or (kind is ChatRequest and field == "logprobs"):
            continue
        option = bounds(name, served=True)
        assert schema["description"] == option.help
        assert (schema.get("minimum"), schema.get("exclusiveMinimum")) == (option.minimum, option.above)
        assert schema.get("maximum") == option.maximum
        checked += 1
    assert checked >= 18


def test_top_k_of_minus_one_is_all_and_replaces_the_recommendation() -> None:
    config = GenerationConfig(sampling={"top_k": 20})
    assert [config.complete({"top_k": k}).top_k for k in (-1, 0, None, 7)] == [0, 0, 20, 7]


def test_unknown_options_are_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match="Did you mean top_p"):
        in_python(top_pp=0.5)
