"""Chat templates and tokenizers in processes that are killed at their time limit."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest

tokenizers = pytest.importorskip("tokenizers")

from infer.errors import ArtifactError, InferError, InputError  # noqa: E402
from infer.llm.text.chat_template import ChatTemplate  # noqa: E402
from infer.llm.text.tokenizer import LLMTokenizer, Tokenizer  # noqa: E402
from infer.process.fork_server import ForkServer  # noqa: E402
from infer.serve.llm import tokenizer_pool, tokenizer_process  # noqa: E402
from infer.serve.llm.tokenizer_pool import ForkedTokenizer, LocalTokenizer  # noqa: E402
from infer.serve.text_jobs.messages import TokenizerConfig  # noqa: E402
from infer.serve.text_jobs.texts import GeneratorTexts  # noqa: E402
from tests.support.fake_llm import FakeLLMPredictor  # noqa: E402
from tests.support.fake_predictors import embedder, live  # noqa: E402

FOLDER = Path(__file__).resolve().parents[3] / "models" / "pydoc_lm"
PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}" + PLAIN
ON_WORD = "{% if 'loop' in messages[0].content %}" + ENDLESS + "{% else %}" + PLAIN + "{% endif %}"
SLOW = "aaaaaaaaaaaaaaaaaaaaaa " * 300  # words, each of which takes (a+)+b some 4 million steps
CHAT = [{"role": "user", "content": "Hello"}]


def model(folder: Path, template: str = PLAIN, pattern: str = "") -> Path:
    """Write the text files of an artifact; `pattern`: a regular expression that splits texts."""
    tokenizer = tokenizers.Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    if pattern:
        split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
        parts = [split, tokenizers.pre_tokenizers.ByteLevel()]
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def run(folder: Path, work: Callable[[ForkedTokenizer], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        forks = ForkServer("infer.serve.text_jobs", TokenizerConfig(folder=str(folder)), "model")
        texts = ForkedTokenizer(forks)
        try:
            await work(texts)
        finally:
            texts.close()
            forks.close()

    asyncio.run(main())


@pytest.fixture
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_pool, "TEMPLATE_SECONDS", 0.3)
    monkeypatch.setattr(tokenizer_process, "TOKENIZER_SECONDS", 2.0)


def test_forked_tokenizer_matches_the_local_one(tmp_path: Path) -> None:
    folder = model(tmp_path)
    known = GeneratorTexts(LLMTokenizer(folder / "tokenizer.json"), ChatTemplate.open(folder))
    local = LocalTokenizer(lambda: known)

    async def work(texts: ForkedTokenizer) -> None:
        await texts.self_test(chat=True)
        for text in ("The json module", "", "é😀\n" * 3000):
            rows = await texts.encode([text, "x"], True, "prompt")
            assert rows == await local.encode([text, "x"], True, "prompt")
            shown = [(rows[0], True), (rows[1], False)]
            assert await texts.decode(shown) == await local.decode(shown)
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"maximum": 10**30}}}]
        assert await texts.encode_chat(CHAT, tools, {"x": 1}) == await local.encode_chat(
            CHAT, tools, {"x": 1}
        )
        for wrong in (10**6, 10**12):
            with pytest.raises(InputError):
                await texts.decode([([wrong], True)])
        with pytest.raises(InputError, match="surrogate"):
            await texts.encode(["\ud800"], True, "prompt")
        assert await texts.encode(["x"], True, "prompt") == [rows[1]]

    run(folder, work)


@pytest.mark.usefixtures("short_limits")
def test_endless_template_raises_artifact_error(tmp_path: Path) -> None:
    async def work(texts: ForkedTokenizer) -> None:
        with pytest.raises(ArtifactError, match=r"chat template of this model took longer than 0\.3 s"):
            await texts.self_test(chat=True)
        assert len(await texts.encode(["Hello"], True, "")) == 1

    run(model(tmp_path, ENDLESS), work)


@pytest.mark.usefixtures("short_limits")
def test_slow_long_conversation_raises_input_error(tmp_path: Path) -> None:
    async def work(texts: ForkedTokenizer) -> None:
        long = [{"role": "user", "content": "loop " + "x" * 200_000}]
        with pytest.raises(InputError, match="chat template took longer") as caught:
            await texts.encode_chat(long, None, {})
        assert (caught.value.status, caught.value.where) == (400, "messages")
        assert await texts.encode_chat(CHAT, None, {})

    run(model(tmp_path, ON_WORD), work)


@pytest.mark.usefixtures("short_limits")
@pytest.mark.parametrize(("text", "said"), [(SLOW, "took longer"), ("a" * 60, "fails on this text")])
def test_backtracking_tokenizer_is_killed_and_restarted(tmp_path: Path, text: str, said: str) -> None:
    async def work(texts: ForkedTokenizer) -> None:
        with pytest.raises(InferError, match=said) as caught:
            await texts.encode([text], True, "prompt")
        assert caught.value.code == "bad_artifact"
        assert len(await texts.encode(["Hello"], True, "")) == 1

    run(model(tmp_path, pattern="(a+)+b"), work)


def test_cancelled_request_does_not_mix_up_the_next_reply(tmp_path: Path) -> None:
    async def work(texts: ForkedTokenizer) -> None:
        expected = await texts.encode(["Hello"], True, "")
        for delay in (0.0, 0.0001, 0.0003, 0.001):
            task = asyncio.create_task(texts.encode(["The json module " * 20], True, ""))
            await asyncio.sleep(delay)
            task.cancel()
            assert await texts.encode(["Hello"], True, "") == expected

    run(model(tmp_path), work)


@pytest.mark.usefixtures("short_limits")
def test_health_responds_during_an_endless_template(tmp_path: Path) -> None:
    fake_llm = FakeLLMPredictor(model(tmp_path, ON_WORD))
    fake_llm.in_workers = True
    with live(fake_llm) as server:
        hostile = {"model": "fake_llm", "messages": [{"role": "user", "content": "loop"}], "max_tokens": 1}
        answers: list[httpx.Response] = []

        def attack() -> None:
            answers.append(httpx.post(f"{server.url}/v1/chat/completions", json=hostile, timeout=60))

        threads = [threading.Thread(target=attack) for _ in range(2)]
        for thread in threads:
            thread.start()
        healthy = 0
        while any(thread.is_alive() for thread in threads):
            healthy += httpx.get(f"{server.url}/health").status_code == 200
        assert healthy > 3
        for answer in answers:
            assert answer.status_code == 500
            assert "chat template of this model took longer" in json.loads(answer.text)["error"]["message"]
        kind = {**hostile, "messages": CHAT}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=kind)
        assert answer.status_code == 200, answer.text


@pytest.mark.usefixtures("short_limits")
def test_model_with_endless_template_is_unready_with_a_reason(tmp_path: Path) -> None:
    fake_llm = FakeLLMPredictor(model(tmp_path, ENDLESS))
    fake_llm.in_workers = True
    with live(fake_llm) as server:
        answer = httpx.get(f"{server.url}/ready")
        assert answer.status_code == 503
        assert "chat template" in answer.text
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_encoder_texts_are_truncated_in_the_forked_process(tmp_path: Path) -> None:
    folder = model(tmp_path)

    async def main() -> None:
        fake = embedder()
        fake.change(path=str(folder), sizes={"seq": (1, 5)})
        fake.tokenizer = None
        texts = tokenizer_pool.encoder_tokenizer(fake)
        assert texts is not None
        texts.start()
        try:
            rows, types = await texts.encode_typed(["one two three four five six seven eight", "x"], "texts")
        finally:
            texts.close()
        expected = Tokenizer(folder / "tokenizer.json", max_length=5)
        assert rows == expected.encode(["one two three four five six seven eight", "x"])
        assert (len(rows[0]), types) == (5, [])

    asyncio.run(main())


def test_hostile_encoder_tokenizer_fails_only_its_request(tmp_path: Path) -> None:
    fake = embedder()
    fake.change(path=str(model(tmp_path, pattern="(a+)+b")), sizes={"batch": (1, 8), "seq": (1, 8)})
    fake.tokenizer = None
    with live(fake) as server:

        def embed(text: str) -> httpx.Response:
            ask = {"model": fake.info.name, "input": text}
            return httpx.post(f"{server.url}/v1/embeddings", json=ask, timeout=60)

        failed = embed("a" * 60)
        assert failed.status_code == 500
        assert "tokenizer of this model fails" in failed.json()["error"]["message"]
        assert embed("Hello").json()["data"][0]["embedding"][1] > 0
