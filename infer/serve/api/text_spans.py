"""Answers with places in a text for /predict: entities of a token classifier, and answers to questions.

Names are those of Hugging Face's inference API, so that its clients read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...errors import InputError
from ...tasks import answers
from ...tasks.answers import Answer
from ..batching.collate import Arrays
from ..batching.tensor_engine import TensorEngine
from ..http.request_context import RequestContext, queue_tenant_of
from ..http.routing import NonfiniteError
from .text_types import Question

TASKS = ("token-classification", "question-answering")
MAX_TEXTS = 1024  # of one request


async def predict_spans(context: RequestContext, engine: TensorEngine, inputs: Any) -> list[Any] | Answer:
    """Return the entities of a text, or of each of a list of texts, or the answer to a question.

    Raises `InputError` for inputs of another task's form.
    """
    if engine.predictor.task == "question-answering":
        if not isinstance(inputs, Question):
            raise InputError("expected an object with question and context", where="inputs")
        rows, outputs = await _run(context, engine, [inputs.context], inputs.question)
        pairs = zip(outputs["start_logits"], outputs["end_logits"], rows, strict=True)
        return answers.best_span(list(pairs), inputs.context)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError("expected a text, or a list of texts", where="inputs")
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InputError(f"expected 1 to {MAX_TEXTS} texts, got {len(texts)}", where="inputs")
    rows, outputs = await _run(context, engine, texts, None)
    labels = list((engine.predictor.manifest.meta or {}).get("labels") or ())
    triples = zip(outputs["logits"], rows, texts, strict=True)
    found = [answers.entities(logits, row, text, labels) for logits, row, text in triples]
    return found[0] if isinstance(inputs, str) else found


async def _run(
    context: RequestContext, engine: TensorEngine, texts: Sequence[str], question: str | None
) -> tuple[list[Any], Arrays]:
    """Tokenize and run texts, or windows of a context: the encodings, and the outputs of each."""
    tenant, timeout = queue_tenant_of(context.service, context.headers), context.timeout()
    engine.check_admission(timeout=timeout, tenant=tenant)
    if engine.texts is not None:
        rows: list[Any] = await engine.texts.encode_spans(texts, question, "inputs")
    else:
        encode = engine.predictor.tokenizer.span_encodings
        rows = await asyncio.get_running_loop().run_in_executor(context.service.pool, encode, texts, question)
    pad = engine.predictor.pad if engine.texts is not None else engine.predictor.tokenizer.pad
    padded = pad([row.ids for row in rows], [row.type_ids for row in rows])
    arrays = {name: padded[name] for name in engine.collator.inputs}
    found = await engine.infer(arrays, timeout=timeout, tenant=tenant)
    context.measure = found.timings
    for name, values in found.outputs.items():
        if wrong := int((~np.isfinite(values)).sum()):
            raise NonfiniteError(name, wrong)
    return rows, found.outputs
