"""OpenAI's /v1/completions: text that follows texts or token ids, whole or as events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...errors import InputError
from ...llm.engine.requests import Output, Request, TokenLogprob
from ..api import openai_logprobs, openai_request, openai_response
from ..api.openai_errors import DIALECT, generator
from ..api.openai_response import Ledger, Piece
from ..api.openai_types import Completion, CompletionChoice, CompletionLogprobs, CompletionRequest
from ..api.server_sent_events import Chunks, encode
from ..http.request_context import RequestContext
from ..http.routing import Route
from ..llm.llm_engine import Generator
from ..llm.tenants import owned, tenant_of
from ..llm.token_stream import Stream
from ..service import Service


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/v1/completions",
            CompletionRequest,
            Completion,
            completions,
            "Text that follows a text",
            DIALECT,
            (422, 429),
            work=True,
            chunk=Completion,
        )
    ]


async def completions(call: RequestContext) -> Any:
    request, unknown = openai_request.read(call, CompletionRequest)
    model = generator(call, request.model)
    _refuse(request)
    timeout = openai_request.timeout(call, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=tenant_of(call))
    special = request.add_special_tokens is not False
    prompts = await openai_request.prompts(call, model, request.prompt, special)
    grammar = openai_request.grammar(request)
    answer = Answer(model, request, prompts, grammar, call.adapter)
    await openai_request.compiled(call, model, grammar, "response_format")
    if request.echo:
        answer.prompt_texts = {r.id: await model.texts.decode(r.prompt, True) for r in answer.requests}
    model.metrics.unknown_fields.inc(unknown)
    stream = model.open(owned(call, answer.requests), timeout=timeout, stepwise=bool(request.stream))
    answer.read(stream)
    call.measure = stream.timings
    if request.stream:
        return openai_response.Events(stream, answer.events, answer.end).reply(model.headers())
    try:
        return answer.whole(await stream.rest())
    finally:
        stream.close()


def _refuse(request: CompletionRequest) -> None:
    if request.suffix:
        raise InputError("text before a suffix is not offered", where="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not offered beyond n", where="best_of")


class Answer:
    """One request and what is said to it; an echo puts the prompt, and what is known of it, in front."""

    def __init__(
        self,
        model: Generator,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        grammar: dict[str, Any] | None,
        adapter: str | None,
    ) -> None:
        self.model, self.request, self.echo = model, request, bool(request.echo)
        self.head = openai_response.head(model, request, "cmpl", "text_completion")
        wanted = request.logprobs
        self.requests = [
            Request(
                id=f"{self.head.id}-{index}",
                prompt=prompt,
                sampling=openai_request.sampling(
                    request,
                    model,
                    openai_request.room(model, prompt, request.max_tokens, openai_request.DEFAULT_TOKENS),
                    wanted,
                    wanted if self.echo else None,
                ),
                priority=request.priority or 0,
                grammar=grammar,
                adapter=adapter,
            )
            for index, prompt in enumerate(prompts)
        ]
        usage, self.always = openai_response.options(request)
        self.chunks, self.final = Chunks(self.head, usage=usage or self.always), usage
        self.prompt_texts: dict[str, str] = {}
        self._echoes: dict[str, list[tuple[int, TokenLogprob | None]]] = {}

    def read(self, stream: Stream) -> None:
        self.stream, self.ledger = stream, Ledger(stream)
        self.lists = [openai_logprobs.Lists(self.model.text) for _ in range(stream.choices)]
        self.begun = [False] * stream.choices

    def whole(self, outputs: Sequence[Output]) -> Completion:
        pieces = [Piece() for _ in range(self.stream.choices)]
        owner = {
            i: key for key, first in self.stream.offset.items() for i in range(first, self.stream.choices)
        }
        for output in outputs:
            self._note(output)
            pieces[self.stream.offset[output.id] + output.index].add(output)
        choices = []
        for index, piece in enumerate(pieces):
            text = "".join((self._prompt_text(owner[index]), *piece.text))
            lists = self._logprobs(index, owner[index], piece.logprobs, first=True)
            choices.append(CompletionChoice(index, text, lists, piece.finish, piece.stopped_by))  # type: ignore[arg-type]
        head = msgspec.structs.asdict(self.head)
        del head["object"]
        return Completion(**head, choices=choices, usage=self.ledger.usage())

    def events(self, outputs: Sequence[Output]) -> bytes:
        made = []
        for output in outputs:
            self._note(output)
            index = self.stream.offset[output.id] + output.index
            first, self.begun[index] = not self.begun[index], True
            text = self._prompt_text(output.id) + output.text if first else output.text
            lists = self._logprobs(index, output.id, output.logprobs, first=first)
            if not text and output.finish is None and lists is None:
                continue
            delta = b'"text":%b' % encode(text)
            if output.finish is not None and output.stopped_by is not None:
                delta += b',"stop_reason":%b' % encode(output.stopped_by)
            usage = encode(self.ledger.usage()) if self.always else b""
            made.append(self.chunks.choice(index, delta, encode(lists), encode(output.finish), usage))
        return b"".join(made)

    def end(self) -> bytes:
        return self.chunks.usage(encode(self.ledger.usage())) if self.final else b""

    def _note(self, output: Output) -> None:
        self.ledger.add(output)
        if output.prompt_logprobs:
            prompt = self.stream.requests[output.id].prompt
            self._echoes[output.id] = list(zip(prompt, output.prompt_logprobs, strict=True))

    def _prompt_text(self, key: str) -> str:
        return self.prompt_texts[key] if self.echo else ""

    def _logprobs(
        self, index: int, key: str, new: Sequence[TokenLogprob], *, first: bool
    ) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        return self.lists[index].of(self._echoes.get(key, ()) if first else (), new)
