"""Calls of one request to one model: admission, runs within the share of its tenant, and steps of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from .. import rows
from ..errors import InputError
from ..llm.completion import Completion
from ..llm.engine.requests import Request
from ..llm.text.tokenizer import TextOrPair
from ..tasks.steps import (
    Compute,
    Decode,
    Encode,
    EncodeSpans,
    FindTokens,
    Generate,
    Outputs,
    RunRows,
    RunTensors,
    RunTexts,
    Step,
    Steps,
    T,
    without_padding,
)
from ..tasks.text_model import TextModel
from .batching import text_inputs
from .batching.collate import Arrays
from .batching.infer_result import InferResult
from .batching.tensor_engine import TensorEngine
from .generation.engine_request import open_stream
from .http.request_context import RequestContext
from .http.routing import NonfiniteError, new_id
from .llm.llm_engine import LLMEngine

MAX_TEXTS = 1 << 14  # of one request, whatever the limits of the queue


class TextUsage(msgspec.Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


def refuse_uncut(truncate: bool) -> None:
    """Raise `InputError` for a request that wants long texts refused, which is not offered."""
    if not truncate:
        raise InputError(
            "texts longer than the model reads are always cut", where="truncate", hint="Leave truncate out"
        )


async def perform(steps: Steps[T], result_of: Callable[[Step], Awaitable[Any]]) -> T:
    """Perform the steps of a task, as `infer.tasks.steps.perform` does, and return its answer."""
    try:
        step = next(steps)
        while True:
            step = steps.send(await result_of(step))
    except StopIteration as done:
        answer: T = done.value
        return answer


class TaskCall:
    """Calls of one request to an engine. `tokens`: those that ran so far.

    `strict`: outputs that are not finite are refused whatever the limits say, as an order or a label needs numbers;
    `default`: seconds of a request that names none.
    """

    def __init__(
        self,
        context: RequestContext,
        engine: TensorEngine,
        *,
        strict: bool = True,
        default: float | None = None,
    ) -> None:
        self.context, self.engine, self.strict, self.default = context, engine, strict, default
        self.model, self.tokens = TextModel.of(engine.info), 0

    def check_admission(self) -> None:
        """Raise `OverloadedError` or `NotReadyError` if this request would be refused now, before it is prepared."""
        timeout, tenant = self.context.timeout(self.default), self.context.queue_tenant
        self.engine.check_admission(timeout=timeout, tenant=tenant)

    @property
    def usage(self) -> TextUsage:
        return TextUsage(self.tokens, self.tokens)

    def check_texts(self, texts: Sequence[TextOrPair], where: str) -> None:
        """Raise `InputError` for no text, an empty one, or too many."""
        most = min(MAX_TEXTS, self.context.service.limits.max_queue_rows)
        if not 1 <= len(texts) <= most:
            raise InputError(f"expected 1 to {most} texts, got {len(texts)}", where=where)
        for index, text in enumerate(texts):
            if "" in ((text,) if isinstance(text, str) else text):
                raise InputError("expected a text that is not empty", where=f"{where}[{index}]")

    async def run_tensors(self, tensors: Sequence[Arrays]) -> list[dict[str, np.ndarray]]:
        """Run tensors of one row each, those of one shape as one request unless rows depend on each other.

        Returns the outputs of each row.
        """
        groups: dict[Any, list[int]] = {}
        for index, arrays in enumerate(tensors):
            alone = () if self.engine.collator.batched else (index,)
            groups.setdefault((*alone, *((n, value.shape) for n, value in arrays.items())), []).append(index)
        found: list[dict[str, np.ndarray]] = [{} for _ in tensors]
        for own in groups.values():
            joined = rows.join(self.engine.info.inputs, [tensors[i] for i in own])
            timeout, tenant = self.context.timeout(self.default), self.context.queue_tenant
            answer = await self.engine.infer(joined, timeout=timeout, tenant=tenant)
            self.context.measure = answer.timings
            for name, values in self._checked(answer.outputs).items():
                for place, row in enumerate(own):
                    found[row][name] = values[place]
        return found

    async def _infer_texts(self, arrays: Arrays, tokens: int) -> InferResult:
        """Run rows of so many tokens, in groups that may share a batch, and count these."""
        timeout, tenant = self.context.timeout(), self.context.queue_tenant
        answer = await text_inputs.infer_rows(self.engine, arrays, timeout=timeout, tenant=tenant)
        self.context.measure = answer.timings
        self.tokens += tokens
        self.engine.metrics.prompt_tokens.inc(tokens)
        return answer

    async def perform(self, steps: Steps[T]) -> T:
        """Perform the steps of a task, and return its answer."""
        return await perform(steps, self._result_of)

    async def _result_of(self, step: Step) -> Any:
        match step:
            case RunTexts():
                return await self._run_texts(step)
            case RunRows():
                return await self._run_rows(step)
            case Encode():
                self.check_admission()
                return (await self.engine.tokenizer.encode_typed(step.texts, step.where)).rows
            case EncodeSpans():
                self.check_admission()
                return await self.engine.tokenizer.encode_spans(step.texts, step.question, step.where)
            case FindTokens():
                return await self.engine.tokenizer.find_tokens(step.tokens)
            case Decode():
                return await self.engine.tokenizer.decode(step.rows, "inputs")
            case Compute():
                loop, pool = asyncio.get_running_loop(), self.context.service.pool
                return await loop.run_in_executor(pool, step.function, *step.arguments)
            case RunTensors():
                return await self.run_tensors(step.tensors)
            case Generate():
                raise InputError(f"{self.model.name} generates no text", where="model")

    async def _run_texts(self, step: RunTexts) -> Outputs:
        self.check_texts(step.texts, step.where)
        self.check_admission()
        rows = await self.engine.tokenizer.encode_typed(step.texts, "texts")
        arrays = text_inputs.padded_rows(self.engine, *rows)
        return await self.run_arrays(arrays, step.outputs)

    async def run_arrays(self, arrays: Arrays, outputs: Sequence[str]) -> Outputs:
        """Run rows of tokens as arrays: some of the outputs, which have no axis of tokens."""
        answer = await self._infer_texts(arrays, text_inputs.count_tokens(arrays))
        return self._checked({name: answer.outputs[name] for name in outputs})

    async def _run_rows(self, step: RunRows) -> Outputs:
        arrays, lengths = step.arrays(self.model.pad_id), [len(row) for row in step.rows]
        given = {name: arrays[name] for name in self.engine.collator.inputs}
        answer = await self._infer_texts(given, sum(lengths))
        return self._checked(without_padding(step, answer.outputs, self.engine.info.outputs, lengths))

    def _checked(self, outputs: Outputs) -> Outputs:
        for name, values in outputs.items():
            parts = [values] if isinstance(values, np.ndarray) else values
            if wrong := sum(int((~np.isfinite(part)).sum()) for part in parts):
                self.engine.metrics.nonfinite.inc(wrong)
                if self.strict or self.engine.limits.nonfinite_error:
                    raise NonfiniteError(name, wrong)
        return outputs


class GenerationCall:
    """Calls of one request to one language model.

    `kind`: with which the ids of its requests begin; `default`: seconds of a request that names none.
    """

    def __init__(
        self, context: RequestContext, engine: LLMEngine, kind: str, default: float | None = None
    ) -> None:
        self.context, self.engine, self.kind, self.default = context, engine, kind, default

    def check_admission(self, requests: int = 1) -> None:
        """Raise `OverloadedError` or `NotReadyError` if so many requests would be refused now."""
        timeout, tenant = self.context.timeout(self.default), self.context.tenant
        self.engine.check_admission(timeout=timeout, requests=requests, tenant=tenant)

    async def perform(self, steps: Steps[T]) -> T:
        """Perform the steps of a task, and return its answer."""
        return await perform(steps, self._result_of)

    async def _result_of(self, step: Step) -> Any:
        match step:
            case Generate():
                return await self.generate(step.requests)
            case Decode():
                return await self.engine.tokenizers.decode(step.rows)
            case Compute():
                run, left = self.context.service.decoders.run, self.context.timeout(self.default)
                return await run(self.context.tenant, left, step.function, *step.arguments)
            case _:
                raise InputError(f"{self.engine.info.name} generates text", where="model")

    async def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Return the completion of each request, to which the id is given here."""
        named = [replace(one, id=new_id(f"{self.kind}-")) for one in requests]
        stream = open_stream(self.context, self.engine, named, timeout=self.context.timeout(self.default))
        try:
            outputs = await stream.read_all()
        finally:
            stream.close()
        found = {one.id: Completion(logprobs=[]) for one in named}
        for output in outputs:
            one = found[output.id]
            one.text += output.text
            one.token_ids = [*one.token_ids, *output.token_ids]
            one.logprobs = [*(one.logprobs or ()), *output.logprobs]
        return list(found.values())
