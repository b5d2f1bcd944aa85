"""OpenAI's /v1/completions: the text that follows a text, in full or as server-sent events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ....errors import InputError
from ....llm.engine.requests import Output, Request, TokenLogprob
from ...generation.engine_request import compile_grammar, complete_sampling, max_new_tokens, open_stream
from ...generation.event_stream import encode, respond
from ...generation.request_fields import read_request
from ...http.request_context import RequestContext
from ...llm.llm_engine import LLMEngine
from ...llm.token_stream import TokenStream, UsageCounter
from ...model_lookup import find_llm
from . import openai_logprobs, openai_request
from .openai_logprobs import CompletionLogprobs
from .openai_response import ChunkedReply, ResponseHead, response_head
from .openai_types import Completion, CompletionChoice, CompletionRequest

DEFAULT_TOKENS = 16  # as OpenAI has it


async def completions(context: RequestContext) -> Any:
    request, unknown = read_request(context, CompletionRequest)
    model = find_llm(context, request.model)
    _refuse_completion(request)
    context.seconds = request.timeout
    timeout = context.generation_timeout()
    model.check_admission(timeout=timeout, priority=request.priority or 0, tenant=context.tenant)
    special = request.add_special_tokens is not False
    prompts = await openai_request.encode_prompts(model, request.prompt, special)
    grammar, constrained_by = openai_request.grammar(request)
    head = response_head(model, request, "cmpl-", "text_completion")
    named = request.src_lang, request.tgt_lang
    requests = [
        Request(
            id=f"{head.id}-{index}",
            prompt=prompt,
            forced_bos_token_id=forced,
            sampling=complete_sampling(model, completion_options(request, model, prompt)),
            priority=request.priority or 0,
            grammar=grammar,
            adapter=context.adapter,
        )
        for index, (prompt, forced) in enumerate(
            (prompt, None) if named == (None, None) else model.text.translated(prompt, *named)
            for prompt in prompts
        )
    ]
    await compile_grammar(context, model, grammar, constrained_by)
    texts = await model.tokenizers.decode([(r.prompt, True) for r in requests]) if request.echo else []
    echoed = {r.id: text for r, text in zip(requests, texts, strict=False)}
    model.metrics.unknown_fields.inc(unknown)
    stream = open_stream(context, model, requests, timeout=timeout, stepwise=bool(request.stream))
    answer = CompletionResponse(model, request, head, stream, echoed)
    return await respond(model, stream, answer, streamed=bool(request.stream))


def _refuse_completion(request: CompletionRequest) -> None:
    if request.suffix:
        raise InputError("text before a suffix is not offered", where="suffix")
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise InputError("best_of is not offered beyond n", where="best_of")


def completion_options(request: CompletionRequest, model: LLMEngine, prompt: Sequence[int]) -> dict[str, Any]:
    """Return the options of `Sampling` for one prompt, None where the request leaves one to the model."""
    return {
        **openai_request.sampling_options(request),
        "max_tokens": max_new_tokens(model, prompt, request.max_tokens, DEFAULT_TOKENS),
        "logprobs": request.logprobs,
        "prompt_logprobs": request.logprobs if request.echo else None,
    }


class CompletionResponse(ChunkedReply):
    """Builder of the response; prompts that are `echoed`, by their request, and their log-probabilities come first."""

    def __init__(
        self,
        model: LLMEngine,
        request: CompletionRequest,
        head: ResponseHead,
        stream: TokenStream,
        echoed: Mapping[str, str],
    ) -> None:
        super().__init__(head, request, UsageCounter(stream), len(stream.choices))
        self.echoed, self.owner = echoed, [prompt.request for prompt in stream.choices]
        self.lists = [
            openai_logprobs.CompletionLogprobsBuilder(
                model.text,
                owner.prompt,
                echoed.get(owner.id, ""),
                skip_special=owner.sampling.skip_special_tokens,
            )
            for owner in (self.owner if request.logprobs is not None else ())
        ]
        self._echoes: dict[str, list[tuple[int, TokenLogprob | None]]] = {}

    def whole(self, outputs: Sequence[Output]) -> Completion:
        own: list[list[Output]] = [[] for _ in self.owner]
        for output in outputs:
            self._note(output)
            own[output.index].append(output)
        choices = []
        for index, parts in enumerate(own):
            key, last = self.owner[index].id, parts[-1]
            text = "".join([self.echoed.get(key, ""), *(part.text for part in parts)])
            new = [known for part in parts for known in part.logprobs]
            lists = self._logprobs(index, key, new, first=True)
            choices.append(CompletionChoice(index, text, lists, last.finish, last.stopped_by))  # type: ignore[arg-type]
        return Completion(**self.fields(), choices=choices)

    def events(self, outputs: Sequence[Output]) -> bytes:
        made = []
        for output in outputs:
            self._note(output)
            index = output.index
            first, self.started[index] = not self.started[index], True
            text = self.echoed.get(output.id, "") + output.text if first else output.text
            lists = self._logprobs(index, output.id, output.logprobs, first=first)
            if not text and output.finish is None and lists is None:
                continue
            delta = b'"text":%b' % encode(text)
            if output.finish is not None and output.stopped_by is not None:
                delta += b',"stop_reason":%b' % encode(output.stopped_by)
            made.append(self.chunk(index, delta, lists, output.finish))
        return b"".join(made)

    def _note(self, output: Output) -> None:
        self.usage.add(output)
        if output.prompt_logprobs:
            prompt = self.owner[output.index].prompt
            self._echoes[output.id] = list(zip(prompt, output.prompt_logprobs, strict=True))

    def _logprobs(
        self, index: int, key: str, new: Sequence[TokenLogprob], *, first: bool
    ) -> CompletionLogprobs | None:
        if not self.lists:
            return None
        return self.lists[index].of(self._echoes.get(key, ()) if first else (), new)
