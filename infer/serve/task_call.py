"""Calls of one request to one tensor model: admission, runs within the share of its tenant, and steps of tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from ..llm.text.tokenizer import TextOrPair
from ..tasks.steps import (
    Compute,
    Decode,
    Encode,
    EncodeSpans,
    FindTokens,
    Outputs,
    RunRows,
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
from .http.request_context import RequestContext
from .http.routing import NonfiniteError

MAX_TEXTS = 1 << 14  # of one request, whatever the limits of the queue


class TaskCall:
    """Calls of one request to an engine. `tokens`: those that ran so far.

    `strict`: outputs that are not finite are refused whatever the limits say, as an order or a label needs numbers.
    """

    def __init__(self, context: RequestContext, engine: TensorEngine, *, strict: bool = True) -> None:
        self.context, self.engine, self.strict = context, engine, strict
        self.model, self.tokens = TextModel.of(engine.predictor), 0

    def check_admission(self, timeout: float | None = None) -> None:
        """Raise `OverloadedError` or `NotReadyError` if this request would be refused now, before it is prepared."""
        left = self.context.timeout() if timeout is None else timeout
        self.engine.check_admission(timeout=left, tenant=self.context.queue_tenant)

    def check_texts(self, texts: Sequence[TextOrPair], where: str) -> None:
        """Raise `InputError` for no text, an empty one, or too many."""
        most = min(MAX_TEXTS, self.context.service.limits.max_queue_rows)
        if not 1 <= len(texts) <= most:
            raise InputError(f"expected 1 to {most} texts, got {len(texts)}", where=where)
        for index, text in enumerate(texts):
            if "" in ((text,) if isinstance(text, str) else text):
                raise InputError("expected a text that is not empty", where=f"{where}[{index}]")

    async def infer(self, arrays: Arrays, default: float | None = None) -> InferResult:
        """Run one request of tensors. `default`: seconds of a request that names none."""
        timeout, tenant = self.context.timeout(default), self.context.queue_tenant
        answer = await self.engine.infer(arrays, timeout=timeout, tenant=tenant)
        self.context.measure = answer.timings
        return answer

    async def _infer_texts(self, arrays: Arrays, tokens: int) -> InferResult:
        """Run rows of so many tokens, in groups that may share a batch, and count these."""
        timeout, tenant = self.context.timeout(), self.context.queue_tenant
        answer = await text_inputs.infer_rows(self.engine, arrays, timeout=timeout, tenant=tenant)
        self.context.measure = answer.timings
        self.tokens += tokens
        self.engine.metrics.prompt_tokens.inc(tokens)
        return answer

    async def perform(self, steps: Steps[T]) -> T:
        """Perform the steps of a task, as `infer.tasks.steps.perform` does, and return its answer."""
        try:
            step = next(steps)
            while True:
                step = steps.send(await self._result_of(step))
        except StopIteration as done:
            answer: T = done.value
            return answer

    async def _result_of(self, step: Step) -> Any:
        predictor, texts = self.engine.predictor, self.engine.texts
        match step:
            case RunTexts():
                return await self._run_texts(step)
            case RunRows():
                return await self._run_rows(step)
            case Encode() if texts is not None:
                self.check_admission()
                return (await texts.encode_typed(step.texts, step.where))[0]
            case Encode():
                self.check_admission()
                return await self._in_thread(predictor.tokenizer.encode, step.texts)
            case EncodeSpans() if texts is not None:
                self.check_admission()
                return await texts.encode_spans(step.texts, step.question, step.where)
            case EncodeSpans():
                self.check_admission()
                return await self._in_thread(predictor.tokenizer.span_encodings, step.texts, step.question)
            case FindTokens() if texts is not None:
                return await texts.find_tokens(step.tokens)
            case FindTokens():
                return [predictor.tokenizer.token_id(token) for token in step.tokens]
            case Decode() if texts is not None:
                return await texts.decode_rows(step.rows)
            case Decode():
                return [predictor.tokenizer.decode(*row) for row in step.rows]
            case Compute():
                return await self._in_thread(step.function, *step.arguments)

    async def _run_texts(self, step: RunTexts) -> Outputs:
        self.check_texts(step.texts, step.where)
        self.check_admission()
        pool, most = self.context.service.pool, self.context.service.limits.max_queue_rows
        arrays = await text_inputs.tokenize(self.engine, step.texts, pool, max_texts=most, prompted=True)
        return await self.run_arrays(arrays, step.outputs)

    async def run_arrays(self, arrays: Arrays, outputs: Sequence[str]) -> Outputs:
        """Run rows of tokens as arrays: some of the outputs, which have no axis of tokens."""
        answer = await self._infer_texts(arrays, text_inputs.count_tokens(arrays))
        return self._checked({name: answer.outputs[name] for name in outputs})

    async def _run_rows(self, step: RunRows) -> Outputs:
        arrays, lengths = step.arrays(self.model.pad_id), [len(row) for row in step.rows]
        given = {name: arrays[name] for name in self.engine.collator.inputs}
        answer = await self._infer_texts(given, sum(lengths))
        return self._checked(without_padding(step, answer.outputs, self.engine.predictor.outputs, lengths))

    def _checked(self, outputs: Outputs) -> Outputs:
        for name, rows in outputs.items():
            parts = [rows] if isinstance(rows, np.ndarray) else rows
            if wrong := sum(int((~np.isfinite(part)).sum()) for part in parts):
                self.engine.metrics.nonfinite.inc(wrong)
                if self.strict or self.engine.limits.nonfinite_error:
                    raise NonfiniteError(name, wrong)
        return outputs

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        pool = self.context.service.pool
        return await asyncio.get_running_loop().run_in_executor(pool, function, *arguments)
