"""OpenAI's /v1/completions: the text that follows a text, in full or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ....llm.engine.requests import Output, Request, TokenLogprob
from ...generation.engine_request import compile_grammar, max_new_tokens
from ...generation.event_stream import EventStream, encode
from ...generation.reply import UsageCounter
from ...http.request_context import RequestContext, assign_tenant
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream
from . import openai_logprobs, openai_prompts, openai_request, openai_response
from .chunk_writer import DONE, ChunkedReply, ChunkWriter
from .openai_errors import find_llm
from .openai_logprobs import CompletionLogprobs
from .openai_response import CompletionBuffer, usage_of
from .openai_types import Completion, CompletionChoice, CompletionRequest


async def completions(context: RequestContext) -> Any:
    request, unknown = openai_request.read_request(context, CompletionRequest)
    model = find_llm(context, request.model)
    _refuse_completion(request)
    timeout = openai_request.timeout(context, request)
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=context.tenant)
    special = request.add_special_tokens is not False
    prompts = await openai_prompts.encode_prompts(context, model, request.prompt, special)
    grammar, constrained_by = openai_request.grammar(request)
    answer = CompletionResponse(model, request, prompts, grammar, context.adapter)
    await compile_grammar(context, model, grammar, constrained_by)
    if request.echo:
        texts = await model.tokenizers.decode([(r.prompt, True) for r in answer.requests])
        answer.prompt_texts = {r.id: text for r, text in zip(answer.requests, texts, strict=True)}
    model.metrics.unknown_fields.inc(unknown)
    stream = model.open(
        assign_tenant(context, answer.requests), timeout=timeout, stepwise=bool(request.stream)
    )
    answer.attach(stream)
    context.measure = stream.timings
    if request.stream:
        return EventStream(stream, answer).reply(model.headers())
    try:
        return answer.full(await stream.read_all())
    finally:
        stream.close()


def _refuse_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise InputError("text before a suffix is not offered", where="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not offered beyond n", where="best_of")


class CompletionResponse(ChunkedReply):
    """Builder of the response; with `echo` the prompt and its log-probabilities come first."""

    def __init__(
        self,
        model: LLMEngine,
        request: CompletionRequest,
        prompts: Sequence[list[int]],
        grammar: dict[str, Any] | None,
        adapter: str | None,
    ) -> None:
        self.model, self.request, self.echo = model, request, bool(request.echo)
        self.head = openai_response.response_head(model, request, "cmpl", "text_completion")
        wanted = request.logprobs
        self.requests = [
            Request(
                id=f"{self.head.id}-{index}",
                prompt=prompt,
                forced_bos_token_id=forced,
                sampling=openai_request.sampling(
                    request,
                    model,
                    max_new_tokens(model, prompt, request.max_tokens, openai_request.DEFAULT_TOKENS),
                    wanted,
                    wanted if self.echo else None,
                ),
                priority=request.priority or 0,
                grammar=grammar,
                adapter=adapter,
            )
            for index, (prompt, forced) in enumerate(openai_request.translated(model, request, prompts))
        ]
        usage, self.always = openai_response.usage_options(request)
        self.chunks, self.final = ChunkWriter(self.head, usage=usage or self.always), usage
        self.prompt_texts: dict[str, str] = {}
        self._echoes: dict[str, list[tuple[int, TokenLogprob | None]]] = {}

    def attach(self, stream: TokenStream) -> None:
        self.ledger = UsageCounter(stream)
        self.owner = [prompt.request for prompt in stream.choices]
        self.lists = [
            openai_logprobs.CompletionLogprobsBuilder(
                self.model.text,
                request.prompt,
                self._prompt_text(request.id),
                skip_special=request.sampling.skip_special_tokens,
            )
            for request in self.owner
        ]
        self.started = [False] * len(self.owner)

    def full(self, outputs: Sequence[Output]) -> Completion:
        pieces = [CompletionBuffer() for _ in self.owner]
        for output in outputs:
            self._note(output)
            pieces[output.index].add(output)
        choices = []
        for index, piece in enumerate(pieces):
            key = self.owner[index].id
            text = "".join((self._prompt_text(key), *piece.text))
            lists = self._logprobs(index, key, piece.logprobs, first=True)
            choices.append(CompletionChoice(index, text, lists, piece.finish, piece.stopped_by))  # type: ignore[arg-type]
        head = msgspec.structs.asdict(self.head)
        del head["object"]
        return Completion(**head, choices=choices, usage=usage_of(self.ledger))

    def events(self, outputs: Sequence[Output]) -> bytes:
        made = []
        for output in outputs:
            self._note(output)
            index = output.index
            first, self.started[index] = not self.started[index], True
            text = self._prompt_text(output.id) + output.text if first else output.text
            lists = self._logprobs(index, output.id, output.logprobs, first=first)
            if not text and output.finish is None and lists is None:
                continue
            delta = b'"text":%b' % encode(text)
            if output.finish is not None and output.stopped_by is not None:
                delta += b',"stop_reason":%b' % encode(output.stopped_by)
            usage = encode(usage_of(self.ledger)) if self.always else b""
            made.append(self.chunks.choice(index, delta, encode(lists), encode(output.finish), usage))
        return b"".join(made)

    def end(self) -> bytes:
        return (self.chunks.usage(encode(usage_of(self.ledger))) if self.final else b"") + DONE

    def _note(self, output: Output) -> None:
        self.ledger.add(output)
        if output.prompt_logprobs:
            prompt = self.owner[output.index].prompt
            self._echoes[output.id] = list(zip(prompt, output.prompt_logprobs, strict=True))

    def _prompt_text(self, key: str) -> str:
        return self.prompt_texts[key] if self.echo else ""

    def _logprobs(
        self, index: int, key: str, new: Sequence[TokenLogprob], *, first: bool
    ) -> CompletionLogprobs | None:
        if self.request.logprobs is None:
            return None
        return self.lists[index].of(self._echoes.get(key, ()) if first else (), new)
