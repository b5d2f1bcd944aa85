"""Text generation of the Predictor: completions, chat, streams and scores, for threads and for asyncio.

Every call goes to one engine on a thread of its own, which batches all requests in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Unpack

import msgspec
import numpy as np
from torch import Tensor

from ..errors import InputError, UsageError
from ..llm.completion import Completion
from ..llm.engine.engine_thread import EngineThread
from ..llm.engine.requests import Request
from ..llm.engine.scheduling.engine_limits import EngineLimits, default_limits
from ..llm.llm import LanguageModel, parse_size
from ..llm.request_streams import AsyncCompletionStream, CompletionStream, acomplete, complete, new_id
from ..llm.step.cuda_graphs import GraphedStep
from ..llm.step.full_sequence_runner import FullSequenceRunner
from ..llm.text.forms import AUTO
from ..llm.text.tool_parser import joined
from ..llm.text.tools import check_tools
from ..tasks.answers import Answer
from ..tasks.steps import Decode, Generate, Step
from ..tasks.whisper_windows import TranscriptOptions, by_decoder
from .generation_options import Options, build_request
from .image_texts import describe
from .task_inputs import GENERATION, TaskInputs
from .text_scores import Prompt, score_texts

Messages = Sequence[Mapping[str, Any]]


class TextGeneration(TaskInputs):
    """Predictor's methods for language models."""

    kv_memory: str | int | None = None
    max_tokens_per_step: int | None = None
    speculation: bool = True
    batch_invariant: bool = False
    tool_form: str = AUTO
    reasoning_form: str = AUTO
    _language_model: LanguageModel | None = None
    _draft: TextGeneration | None = None

    @property
    def language_model(self) -> LanguageModel:
        """Tokenizer, chat template and engine of a language model; raises `UsageError` for any other."""
        if self._language_model is None:
            runner = self._runner
            if not isinstance(runner, FullSequenceRunner):
                raise UsageError(*self._why_not())
            self._language_model = LanguageModel(
                _LockedStep(runner.step, self._lock),
                runner.shape,
                self.path,
                name=self.name,
                device=runner.device,
                kv_bytes=parse_size(self.kv_memory, "kv_memory"),
                limits=_limits(runner.device, self.max_tokens_per_step, self.batch_invariant),
                speculation=self.speculation,
                draft=None if self._draft is None else self._draft.language_model,
            )
            self._language_model.tool_form, self._language_model.reasoning_form = (
                self.tool_form,
                self.reasoning_form,
            )
        return self._language_model

    def use_draft(self, draft: TextGeneration) -> None:
        """Let another model draft; it is closed with this one. Raises `UsageError` where the two don't fit."""
        self._draft = draft
        _ = self.language_model

    @property
    def engine_client(self) -> EngineThread:
        return self.language_model.engine_client

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Any:
        """Complete a prompt (text or token ids): returns a `Completion`, for a list of prompts a list of them.

        With `n` above 1 each result is a list of `n` completions. Raises `InputError` for a prompt longer than the
        context or an option out of its range, `OverloadedError` when too many requests wait, and `UsageError` for a
        model that can't generate.
        """
        rows, many = _split(prompts)
        requests = [self._request(self.language_model.prompt_ids(row), options) for row in rows]
        return _shaped(complete(self.engine_client, requests), many)

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Any:
        """Complete prompts as `generate` does, for asyncio; cancelling the task cancels the requests."""
        rows, many = _split(prompts)
        requests = [self._request(self.language_model.prompt_ids(row), options) for row in rows]
        return _shaped(await acomplete(self.engine_client, requests), many)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> CompletionStream:
        """Complete a prompt piece by piece: returns an iterator of `CompletionChunk`.

        Its `.completion` is the `Completion` so far. `close()`, the end of its `with` block and garbage collection
        cancel the request.
        """
        return CompletionStream(
            self.engine_client,
            self._request(self.language_model.prompt_ids(prompt), options),
        )

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncCompletionStream:
        """Stream as `stream` does, for `async for`."""
        return AsyncCompletionStream(
            self.engine_client,
            self._request(self.language_model.prompt_ids(prompt), options),
        )

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Answer a conversation such as [{"role": "user", "content": "..."}]; returns a `Completion`.

        The prompt is made by the artifact's chat template, with `template` as further variables. With `tools`
        (functions in OpenAI's format) calls come as `.tool_calls`; thoughts as `.reasoning`, which no constraint of the
        options binds; other text as `.text`. Raises as `generate` does, and `UsageError` for a model without a chat
        template.
        """
        checked = check_tools(tools) if tools else None
        model = self.language_model
        ids = model.chat_ids(messages, tools, **dict(template or {}))
        found = complete(self.engine_client, [self._chat_request(ids, options)])
        end = model.prompt_end(ids)
        for made in found[0]:
            if (parser := model.parser(end, checked)) is not None:
                parsed = joined((*parser.push(made.text), *parser.finish()))
                made.text, made.reasoning, made.tool_calls = (
                    parsed.content or "",
                    parsed.reasoning,
                    parsed.calls,
                )
        return _shaped(found, many=False)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> CompletionStream:
        """Answer a conversation piece by piece: `chat` as a stream, without reading tool calls and thoughts."""
        ids = self.language_model.chat_ids(messages, tools, **dict(template or {}))
        return CompletionStream(self.engine_client, self._chat_request(ids, options))

    def score(self, texts: Prompt | Sequence[Prompt], *, special: bool = True) -> Any:
        """Score a text (or token ids): log probability of each token given those before it, and perplexity.

        Returns a `Score`, for a list a list of them. `special` puts the begin token before a text, if the tokenizer
        has one. A text longer than the context is read in windows that overlap by half, so that each token has at
        least half a context before it.
        """
        rows, many = _split(texts)
        scores = score_texts(self.language_model, rows, special=special)
        return scores if many else scores[0]

    def _request(self, prompt: list[int], options: Options) -> Request:
        return build_request(self.language_model, prompt, options)

    def _chat_request(self, prompt: list[int], options: Options) -> Request:
        """Build the request of a chat: its constraint is on the answer, and marks of thoughts stay in the text."""
        model = self.language_model
        request = build_request(model, prompt, options)
        if model.has_special_marks():
            shown = msgspec.structs.replace(request.sampling, skip_special_tokens=False)
            request = msgspec.structs.replace(request, sampling=shown)
        grammar = model.forms.constrain(request.grammar, model.prompt_end(prompt))
        if grammar is not request.grammar and grammar is not None:
            model.check_grammar(grammar)
            request = msgspec.structs.replace(request, grammar=grammar)
        return request

    def _described(self, rows: list[tuple[Any, str]]) -> list[Answer]:
        return describe(rows, self.media, self.language_model)

    def _transcript(self, sound: np.ndarray) -> Answer:
        """Return {"text", "language", "segments"}, of which each has its times; the language is detected."""
        options = TranscriptOptions(timestamps=True)
        found = self._perform(
            by_decoder(self.media, sound, self.inputs, self.language_model.context, options)
        )
        segments = [
            {"start": round(one.start, 3), "end": round(one.end, 3), "text": one.text}
            for one in found.segments or ()
        ]
        return {"text": found.text, "language": found.language, "segments": segments}

    def _result_of(self, step: Step) -> Any:
        if isinstance(step, Generate):
            requests = [msgspec.structs.replace(request, id=new_id()) for request in step.requests]
            return [one for [one] in complete(self.engine_client, requests)]
        if isinstance(step, Decode) and self.task == GENERATION:
            return [self.language_model.decode(ids, skip) if ids else "" for ids, skip in step.rows]
        return super()._result_of(step)

    def _why_not(self) -> tuple[str]:
        if self._runner is None:
            return ("this Predictor is closed; open the artifact again with Predictor.load",)
        if self.task != "text-generation":
            return (f"{self.name} is a {self.task} model: it generates no text",)
        only = self.manifest.scores_only
        if self.manifest.plan.task == "score":
            return (f"{self.name} can't generate: it was made with --task score; make it again without",)
        if only is not None and only.by_model:
            return (f"{self.name} scores text only, by infer predict: {only.reason}",)
        why = (
            only.reason
            if only is not None
            else f"backend {self.manifest.backend} lowered whole windows of tokens"
        )
        return (f"{self.name} can't generate: {why}; make it again with --backend inductor",)

    def close(self) -> None:
        if self._language_model is not None:
            self._language_model.close()
        if self._draft is not None:
            self._draft.close()
        super().close()


class _LockedStep:
    """Step that shares the Predictor's lock, so that one call runs at a time."""

    def __init__(self, step: Any, lock: threading.Lock) -> None:
        self._step, self.lock = step, lock

    @property
    def graphs(self) -> GraphedStep | None:
        """CUDA graphs of the step, if it has some."""
        return self._step if isinstance(self._step, GraphedStep) else None

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with self.lock:
            return self._step.run(inputs)


def _limits(device: str, step_tokens: int | None, batch_invariant: bool) -> EngineLimits:
    defaults = msgspec.structs.replace(default_limits(device), batch_invariant=batch_invariant)
    if step_tokens is None:
        return defaults
    return msgspec.structs.replace(
        defaults,
        step_tokens=step_tokens,
        mixed_tokens=min(defaults.mixed_tokens, step_tokens),
        max_running=min(defaults.max_running, step_tokens),
    )


def _split(prompts: Any) -> tuple[list[Prompt], bool]:
    """Return the prompts, and True if they came as a list of several."""
    if isinstance(prompts, str):
        return [prompts], False
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InputError(f"expected text or token ids, got {type(prompts).__name__}", where="prompts")
    if prompts and all(isinstance(item, int) and not isinstance(item, bool) for item in prompts):
        return [prompts], False
    return list(prompts), True


def _shaped(found: list[list[Completion]], many: bool) -> Any:
    rows = [row if len(row) > 1 else row[0] for row in found]
    return rows if many else rows[0]
