"""Response of /v1/completions: one text per completion, in full or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....llm.engine.requests import Output, Request, TokenLogprob
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream
from . import openai_logprobs, openai_request, openai_response
from .openai_logprobs import CompletionLogprobs
from .openai_response import ChunkWriter, CompletionBuffer, UsageCounter, encode
from .openai_types import Completion, CompletionChoice, CompletionRequest


class CompletionResponse:
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
                    openai_request.max_new_tokens(
                        model, prompt, request.max_tokens, openai_request.DEFAULT_TOKENS
                    ),
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
        self.stream, self.ledger = stream, UsageCounter(stream)
        self.owner = [key for key, one in stream.requests.items() for _ in range(one.sampling.n)]
        self.lists = [
            openai_logprobs.CompletionLogprobsBuilder(
                self.model.text,
                stream.requests[key].prompt,
                self._prompt_text(key),
                skip_special=stream.requests[key].sampling.skip_special_tokens,
            )
            for key in self.owner
        ]
        self.started = [False] * stream.choices

    def full(self, outputs: Sequence[Output]) -> Completion:
        pieces = [CompletionBuffer() for _ in range(self.stream.choices)]
        for output in outputs:
            self._note(output)
            pieces[self.stream.offset[output.id] + output.index].add(output)
        choices = []
        for index, piece in enumerate(pieces):
            text = "".join((self._prompt_text(self.owner[index]), *piece.text))
            lists = self._logprobs(index, self.owner[index], piece.logprobs, first=True)
            choices.append(CompletionChoice(index, text, lists, piece.finish, piece.stopped_by))  # type: ignore[arg-type]
        head = msgspec.structs.asdict(self.head)
        del head["object"]
        return Completion(**head, choices=choices, usage=self.ledger.usage())

    def events(self, outputs: Sequence[Output]) -> bytes:
        made = []
        for output in outputs:
            self._note(output)
            index = self.stream.offset[output.id] + output.index
            first, self.started[index] = not self.started[index], True
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

    def final_event(self) -> bytes:
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
