"""Requests of one text on the fast path: a template of the body finds the text; texts that wait are tokenized together.

Responses equal those of the ordinary path, which gets long texts and other JSON than that of a template.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from ...errors import InferError
from ...llm.text.embedding_prompts import with_prompt
from ..api.kserve.kserve_response import RequestedOutputs, encode_response
from ..api.kserve.kserve_types import InferRequest
from ..batching.infer_result import InferResult
from ..batching.queue_items import ItemOwner
from ..batching.tensor_engine import DEFAULT_PRIORITY, TensorEngine
from ..batching.text_inputs import count_tokens
from ..fork_server.messages import TokenRows
from ..http.request_context import RequestContext
from ..http.routing import Response
from ..llm.tokenizer_pool import INLINE_CHARACTERS
from .body_cache import DATA, MAX_TEMPLATE_BYTES, MAX_TEMPLATES
from .fast_request import FastRequest

log = logging.getLogger("infer.serve")
decode_texts = msgspec.json.Decoder(list[str]).decode


@dataclass(frozen=True, slots=True, eq=False)
class TextTemplate:
    """Request of one text without the text. `timeout`: seconds."""

    outputs: RequestedOutputs
    timeout: float
    priority: int


class TextBodies:
    """Templates of one model's text requests, by the bytes before and after the list of texts; cleared when full."""

    def __init__(self, engine: TensorEngine) -> None:
        self._engine = engine
        self._meta: Mapping[str, Any] = getattr(engine.predictor.manifest, "meta", None) or {}
        self.templates: dict[tuple[bytes, bytes], TextTemplate] = {}

    def find(self, body: bytes) -> tuple[TextTemplate, str] | None:
        """Return the template of a body and its text with the model's prompt; None for a text that is long."""
        if not self.templates or self._engine.texts is None:
            return None
        start, end = _bounds(body)
        template = self.templates.get((body[:start], body[end:]))
        if template is None:
            return None
        try:
            # A whole JSON list in the place of another one: the rest of the body keeps its meaning.
            texts = decode_texts(body[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        if len(texts) != 1:
            return None
        text = with_prompt(texts, self._meta)[0]
        return (template, text) if isinstance(text, str) and len(text) < INLINE_CHARACTERS else None

    def learn(self, body: bytes, request: InferRequest, outputs: RequestedOutputs, priority: int) -> None:
        """Add the template of a checked body of one text, unless more than the text could differ next time."""
        given = request.inputs[0]
        if request.id is not None or body.count(DATA) != 1 or given.shape not in ([1], [1, 1]):
            return
        start, end = _bounds(body)
        try:
            texts = decode_texts(body[start:end])
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        if texts != given.data or start + len(body) - end > MAX_TEMPLATE_BYTES:
            return
        if len(self.templates) >= MAX_TEMPLATES:
            self.templates.clear()
        timeout = request.parameters.get("timeout", 0) / 1e6 or float("inf")
        self.templates[body[:start], body[end:]] = TextTemplate(outputs, timeout, priority)


def _bounds(body: bytes) -> tuple[int, int]:
    """Return the bounds of the first list after the first "data", which ends with the last string of the body."""
    return body.find(b"[", body.find(DATA)), body.rfind(b'"]') + 2


class TextOwner(ItemOwner):
    """Owner of the queue item of one text request, from its tokenization on; a `fast_request.Group` of one."""

    __slots__ = ("_alarm", "_engine", "_request", "_rows", "_template", "_tenant", "_timeout")

    def __init__(
        self,
        engine: TensorEngine,
        template: TextTemplate,
        request: FastRequest,
        timeout: float,
        tenant: str,
    ) -> None:
        super().__init__()
        self._engine, self._template, self._request = engine, template, request
        self._timeout, self._tenant = timeout, tenant
        self._rows: asyncio.Future[TokenRows] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        request.group = self

    def start(self, text: str, admissible: set[Hashable]) -> None:
        """Have the text tokenized, unless the request would be refused now.

        `admissible`: kinds of requests of this loop iteration that would not be refused; none is checked twice.
        """
        engine = self._engine
        kind = engine, self._timeout, self._tenant
        try:
            if self._template.priority == DEFAULT_PRIORITY and kind not in admissible:
                engine.check_admission(timeout=self._timeout, tenant=self._tenant)
                admissible.add(kind)
            if engine.texts is None:
                raise InferError("the model has no tokenizer process")
            self._rows = engine.texts.tokenize_soon(text, "texts")
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            self._request.fail(error)
        else:
            self._rows.add_done_callback(self._tokenized)

    def _tokenized(self, rows: asyncio.Future[TokenRows]) -> None:
        if rows.cancelled():
            return
        engine, request = self._engine, self._request
        self._rows = None
        try:
            found = rows.result()
            if request.settled:
                return
            padded = engine.predictor.pad(found.rows, found.types)
            arrays = {name: padded[name] for name in engine.collator.inputs}
            engine.metrics.prompt_tokens.inc(count_tokens(arrays))
            engine.submit(
                *(self, arrays), timeout=self._timeout, priority=self._template.priority, tenant=self._tenant
            )
            self._alarm = engine.loop.call_later(self._timeout, engine.expire, self)
        except Exception as error:  # noqa: BLE001 - whatever it was, this request alone ends
            request.fail(error)

    def resolve(self, outcome: InferResult | Exception) -> None:
        # One loop iteration later: the next batch is sent to the worker before responses are encoded.
        self._engine.loop.call_soon(self._respond, outcome)

    def _respond(self, outcome: InferResult | Exception) -> None:
        if isinstance(outcome, Exception):
            self._request.fail(outcome)
        else:
            self._request.finish(0, outcome)

    def leave(self, request: FastRequest) -> None:
        """Cancel the request, whose client is gone."""
        if self._rows is not None:
            self._rows.cancel()
        elif self.items and not self.settled:
            self._engine.cancel_request(self)

    def response(self, context: RequestContext, answer: InferResult) -> Response:
        """Make the response. Raises `InferError` for outputs that cannot be sent."""
        context.measure = answer.timings
        return encode_response(self._engine, None, answer, self._template.outputs)

    def end(self, count: int) -> None:
        """Release what the request holds: results and tracebacks refer to shared memory."""
        if self._alarm is not None:
            self._alarm.cancel()
        self.settled, self.items, self._rows = True, [], None
