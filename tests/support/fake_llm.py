"""A fake language model for serving tests: bytes as tokens, one letter per step.

`python -m tests.support.fake_llm FOLDER SECONDS DRAIN` serves one.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from infer.artifact.model_info import ModelInfo
from infer.errors import InputError
from infer.llm.engine.engine_thread import EngineThread
from infer.llm.engine.requests import Output, Request, TokenLogprob
from infer.llm.engine.stats import EngineStats
from infer.llm.text.chat_template import ChatTemplate
from infer.llm.text.generation_config import GenerationConfig
from infer.llm.text.text_side import TextSide
from infer.llm.text.tokenizer import LLMTokenizer
from infer.serve.served_model import EngineClient, ServedModel

BEGIN, END = 256, 257
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}assistant:"
CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Bytes(LLMTokenizer):
    """Tokenizer of 256 bytes, a begin and an end token."""

    vocab_size = 258
    special = {BEGIN: "<s>", END: "</s>"}

    def __init__(self) -> None:
        pass

    def encode(self, text: str, special: bool = True) -> list[int]:
        if text.startswith("<s>"):
            return [BEGIN, *text[3:].encode()]
        return [BEGIN] * special + list(text.encode())

    def decode(self, ids: list[int], skip_special: bool = True) -> str:
        known = (b"" if t in self.special and skip_special else self.token_bytes(t) for t in ids)
        return b"".join(known).decode(errors="replace")

    def token_bytes(self, number: int) -> bytes:
        """Return the bytes of a token; none of those that a real tokenizer beside this model may make."""
        if number in self.special:
            return self.special[number].encode()
        return bytes([number]) if number < 256 else b""

    def piece(self, number: int) -> str:
        return self.token_bytes(number).decode("latin-1")


class FakeEngine:
    """Fake engine that generates A, B, C, …; completion `i` starts at letter `i`.

    With a `script` it generates that text instead, three bytes a step, and stops; with a grammar,
    `constrained`, where that is given. `seconds` per step; no step runs while `gate` is closed. A prompt with
    "!" fails at its second letter, one with "#" kills the engine.
    """

    def __init__(
        self, seconds: float = 0.0, script: str | None = None, constrained: str | None = None
    ) -> None:
        self.seconds, self.script, self.constrained = seconds, script, constrained
        self.gate = threading.Event()
        self.gate.set()
        self.jobs: dict[str, list[Any]] = {}  # id → request, letters so far
        self.cancelled: list[str] = []
        self.steps = 0

    @property
    def idle(self) -> bool:
        return not self.jobs

    def check(self, request: Request) -> None:
        if ord("%") in request.prompt:
            raise InputError("no percentages", where="prompt")

    def begin(self, request: Request) -> None:
        self.jobs[request.id] = [request, 0]

    def cancel(self, request_id: str) -> None:
        if self.jobs.pop(request_id, None) is not None:
            self.cancelled.append(request_id)

    def step(self) -> list[Output]:
        self.gate.wait(0.05)
        if not self.gate.is_set():
            return []
        time.sleep(self.seconds)
        self.steps += 1
        return [output for request, made in list(self.jobs.values()) for output in self._go_on(request, made)]

    def stats(self) -> EngineStats:
        names = ("pages_used", "pages_total", "prefix_queries", "prefix_hits", "preemptions", "draft_tokens")
        more = ("evictions", "accepted_tokens", "prefill_tokens", "steps")
        seconds = ("scheduling_seconds", "step_seconds", "sampling_seconds", "output_seconds")
        return EngineStats(**dict.fromkeys((*names, *more, *seconds), 7))

    def _go_on(self, request: Request, made: int) -> list[Output]:
        if ord("#") in request.prompt:
            raise RuntimeError("the secret of the engine's insides")
        ask, first = request.sampling, made == 0
        if ord("!") in request.prompt and made == 1:
            self.cancel(request.id)
            return [Output(id=request.id, index=i, finish="error", stopped_by="boom") for i in range(ask.n)]
        if self.script is not None:
            script = self.constrained if request.grammar and self.constrained else self.script
            return self._read_on(request, made, script.encode())
        last = made + 1 >= ask.max_tokens
        self.jobs[request.id][1] += 1
        if last:
            del self.jobs[request.id]
        known = _prompt_logprobs(request)
        outputs = []
        for index in range(ask.n):
            token = ord(CAPITALS[(made + index) % 26])
            tokens = (token,) if ask.max_tokens else ()
            outputs.append(
                Output(
                    id=request.id,
                    index=index,
                    token_ids=tokens,
                    text="".join(map(chr, tokens)),
                    logprobs=() if ask.logprobs is None else tuple(map(_logprob, tokens)),
                    finish="length" if last else None,
                    prompt_logprobs=known if first and index == 0 else (),
                    cached_tokens=2 if first else 0,
                )
            )
        return outputs

    def _read_on(self, request: Request, made: int, script: bytes) -> list[Output]:
        self.jobs[request.id][1] += 3
        tokens = tuple(script[made : made + 3])
        last = made + 3 >= len(script)
        if last:
            del self.jobs[request.id]
        known = () if request.sampling.logprobs is None else tuple(map(_logprob, tokens))
        finish = "stop" if last else None
        shown = [script[: made + i].decode(errors="ignore") for i in range(len(tokens) + 1)]
        text = shown[-1][len(shown[0]) :]
        return [
            Output(
                id=request.id,
                index=i,
                token_ids=tokens,
                text=text,
                ends=tuple(len(one) - len(shown[0]) for one in shown[1:]),
                logprobs=known,
                finish=finish,
                prompt_logprobs=() if made or i else _prompt_logprobs(request),
            )
            for i in range(request.sampling.n)
        ]


def check_grammar(constraint: Mapping[str, Any], tried: tuple[int, float] = (0, 0.0)) -> None:
    if constraint == {"regex": "("}:
        raise InputError("this regex can't be read", where="regex")


def _prompt_logprobs(request: Request) -> tuple[TokenLogprob | None, ...]:
    if request.sampling.prompt_logprobs is None:
        return ()
    return (None, *map(_logprob, request.prompt[1:]))


def _logprob(token: int) -> TokenLogprob:
    return TokenLogprob(token, -token / 100, ((token, -token / 100), (0, -9.0)))


class FakeLanguageModel(TextSide):
    """Text side of the fake model."""

    start_tokens = page_bytes = 0
    adapter_names: tuple[str, ...] = ()
    grammars = None

    def __init__(
        self,
        engine_client: EngineClient,
        folder: Path,
        template: str | None = TEMPLATE,
        context: int = 64,
        check_grammar: Callable[..., None] = check_grammar,
    ) -> None:
        super().__init__(folder, "fake_llm", Bytes.vocab_size)
        self.engine_client, self.context, self.check_grammar = engine_client, context, check_grammar
        self.text_or_none, self.config = Bytes(), GenerationConfig()
        self.template = ChatTemplate({"default": template}, SPECIAL_TOKENS) if template else None


class FakeLLMPredictor(ServedModel):
    """The fake model as it is served in this process."""

    def __init__(
        self,
        folder: Path,
        name: str = "fake_llm",
        engine: FakeEngine | None = None,
        template: str | None = TEMPLATE,
        context: int = 64,
    ) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps(SPECIAL_TOKENS))
        engine_client = EngineThread(engine or FakeEngine(), name=name)
        super().__init__(
            info=ModelInfo(name=name, task="text-generation", meta={"generation": {}}, files={"a": "b"}),
            close=engine_client.close,
            language_model=FakeLanguageModel(engine_client, folder, template, context),
        )


if __name__ == "__main__":
    from infer.serve.http.listener import listen
    from infer.serve.limits import ServeLimits
    from infer.serve.server import serve
    from infer.serve.service import Service

    with listen("127.0.0.1", 0) as socket_:
        fake_llm = FakeLLMPredictor(Path(sys.argv[1]), engine=FakeEngine(float(sys.argv[2])))
        sys.exit(serve(Service([fake_llm], ServeLimits(drain_seconds=float(sys.argv[3]))), socket_))
