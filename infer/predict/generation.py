"""Text out: completions, chat, streams and scores of a language model, for threads and for asyncio.

Every call goes to one engine on a thread of its own, which runs whatever is under way together.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

import msgspec
from torch import Tensor

from ..errors import InputError, UsageError
from ..generate.completion import Completion, Score, scored, windows
from ..generate.driver import Driver
from ..generate.language import Language, parse_size
from ..generate.requests import Request, Sampling
from ..generate.running import AsyncStream, Stream, acomplete, complete, new_id
from ..generate.scheduler import EngineLimits
from ..generate.tools import check_tools, parse, style_of
from ..generate.windows import Windows
from .texts import Texts

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


class Options(TypedDict, total=False):
    """How to generate. What is left out, or None, is as the model's makers recommend (generation_config.json), else as
    `Sampling` has it: the model's own distribution. `max_tokens`: 256, or as many as fit.

    At most one of `json_schema` (a schema), `regex` and `choice` (strings) constrains the output.
    """

    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    include_stop: bool | None
    skip_special_tokens: bool | None
    ignore_eos: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    n: int | None
    priority: int
    adapter: str | None
    json_schema: Mapping[str, Any] | None
    json_object: bool | None
    regex: str | None
    choice: Sequence[str] | None


_CONSTRAINTS = ("json_schema", "json_object", "regex", "choice")
_OWN = ("priority", "adapter", *_CONSTRAINTS)


class Generation(Texts):
    kv_memory: str | int | None = None
    max_tokens_per_step: int | None = None
    speculation: bool = True
    batch_invariant: bool = False
    _language: Language | None = None

    @property
    def language(self) -> Language:
        """The model's text side and engine; raises `UsageError` for an artifact that can't generate, saying why."""
        if self._language is None:
            runner = self._runner
            if not isinstance(runner, Windows):
                raise UsageError(*self._why_not())
            self._language = Language(
                _Shared(runner.step, self._lock),
                runner.shape,
                self.path,
                name=self.name,
                device=runner.device,
                kv_bytes=parse_size(self.kv_memory, "kv_memory"),
                limits=_limits(self.max_tokens_per_step, self.batch_invariant),
                speculation=self.speculation,
            )
        return self._language

    @property
    def driver(self) -> Driver:
        return self.language.driver

    def generate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Any:
        """Complete one prompt (text or token ids) → `Completion`; a list of prompts → a list of them.

        With `n` above 1 each is a list of `n`. Raises `InputError` for a prompt that does not fit the context, or a
        parameter out of its range; `OverloadedError` when too many requests wait.
        """
        rows, many = _split(prompts)
        requests = [self._request(self.language.prompt_ids(row), options) for row in rows]
        return _shaped(complete(self.driver, requests), many)

    async def agenerate(self, prompts: Prompt | Sequence[Prompt], **options: Unpack[Options]) -> Any:
        """`generate` for asyncio; cancelling the task cancels the requests."""
        rows, many = _split(prompts)
        requests = [self._request(self.language.prompt_ids(row), options) for row in rows]
        return _shaped(await acomplete(self.driver, requests), many)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """An iterator of pieces, each with `.text`; `close()`, leaving its `with` or dropping it cancels the request.

        `.completion` is what has come so far.
        """
        return Stream(self.driver, self._request(self.language.prompt_ids(prompt), options))

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncStream:
        """`stream` for `async for`."""
        return AsyncStream(self.driver, self._request(self.language.prompt_ids(prompt), options))

    def chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Any:
        """Answer a conversation ([{"role": "user", "content": "…"}]) by the artifact's own chat template.

        With `tools` (functions, as OpenAI has them) calls are read into `.tool_calls`, the rest is `.text`.
        `template`: variables for it. Raises `UsageError` for a model without one.
        """
        checked = check_tools(tools) if tools else []
        ids = self.language.chat_ids(messages, tools, **dict(template or {}))
        found = complete(self.driver, [self._request(ids, options)])
        if checked and self.language.template is not None:
            style = style_of("\n".join(self.language.template.sources.values()))
            for made in found[0]:
                content, made.tool_calls = parse(made.text, style, checked)
                made.text = (content or "") if made.tool_calls else made.text
        return _shaped(found, many=False)

    def stream_chat(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template: Mapping[str, Any] | None = None,
        **options: Unpack[Options],
    ) -> Stream:
        """`chat`, piece by piece."""
        ids = self.language.chat_ids(messages, tools, **dict(template or {}))
        return Stream(self.driver, self._request(ids, options))

    def score(self, texts: Prompt | Sequence[Prompt], *, special: bool = True) -> Any:
        """Logprob of each token of a text (or token ids) after those before it → `Score`; a list for a list.

        `special` puts the begin token before a text, if the tokenizer has one. A text longer than the context is read
        in windows that overlap by half, so that each token has at least half a context before it.
        """
        language = self.language
        rows, many = _split(texts)
        ids = [language.encode(r, special) if isinstance(r, str) else language.prompt_ids(r) for r in rows]
        for index, row in enumerate(ids):
            if not row:
                raise InputError("expected at least one token", where=f"texts[{index}]")
        cuts = [windows(len(row), language.context) for row in ids]
        sampling = Sampling(max_tokens=0, prompt_logprobs=0)
        requests = [
            Request(id=new_id(), prompt=row[start:stop], sampling=sampling)
            for row, cut in zip(ids, cuts, strict=True)
            for start, stop, _ in cut
        ]
        read = iter(complete(self.driver, requests))
        scores = []
        for row, cut, text in zip(ids, cuts, rows, strict=True):
            parts = []
            for start, _, first in cut:
                logprobs = next(read)[0].prompt_logprobs or []
                parts.append((first, logprobs[first - start :]))
            size = len(text.encode()) if isinstance(text, str) else None
            scores.append(
                Score(token_ids=row, logprobs=scored(row, parts), windows=len(cut), text_bytes=size)
            )
        return scores if many else scores[0]

    def _request(self, prompt: list[int], options: Options) -> Request:
        if unknown := sorted(set(options) - Options.__annotations__.keys()):
            raise UsageError(f"generate has no option {unknown[0]!r}")
        given = {name: value for name, value in options.items() if name not in _OWN}
        grammar = _grammar(options)
        if grammar is not None:
            self.language.check_grammar(grammar)
        return Request(
            id=new_id(),
            prompt=prompt,
            sampling=self.language.sampling(len(prompt), given),
            priority=options.get("priority", 0),
            adapter=options.get("adapter"),
            grammar=grammar,
        )

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
        if self._language is not None:
            self._language.close()
        super().close()


class _Shared:
    """The step, one call at a time with whatever else the Predictor runs."""

    def __init__(self, step: Any, lock: threading.Lock) -> None:
        self._step, self._lock = step, lock

    def run(self, inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        with self._lock:
            return self._step.run(inputs)


def _limits(step_tokens: int | None, batch_invariant: bool) -> EngineLimits:
    defaults = EngineLimits(batch_invariant=batch_invariant)
    if step_tokens is None:
        return defaults
    return msgspec.structs.replace(
        defaults,
        step_tokens=step_tokens,
        mixed_tokens=min(defaults.mixed_tokens, step_tokens),
        max_running=min(defaults.max_running, step_tokens),
    )


def _grammar(options: Options) -> dict[str, Any] | None:
    given = {name: options.get(name) for name in _CONSTRAINTS if options.get(name)}
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} are two constraints on one output", hint="Give one of them")
    return given or None


def _split(prompts: Any) -> tuple[list[Prompt], bool]:
    """The prompts, and whether they came as a list of several."""
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
