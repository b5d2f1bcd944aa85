"""Answers with places in a text for /predict: entities, answers to questions, and tokens of a mask.

Names are those of Hugging Face's inference API, so that its clients read them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....errors import InputError
from ....tasks import text_answers
from ....tasks.answers import TOP, Answer
from ....tasks.text_answers import FilledMask
from ...batching import text_inputs
from ...batching.collate import Arrays
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext, queue_tenant_of
from ...http.routing import NonfiniteError
from ..media.media_request import in_thread
from .text_types import PredictParameters, Question

TASKS = ("token-classification", "question-answering", "fill-mask")
STRATEGIES = ("none", "simple")
MAX_TEXTS = 1024  # of one request
ROWS_AT_ONCE = 8  # of texts with masks, whose logits have the whole vocabulary for each token
MAX_FILLED = 1 << 20  # tokens of the filled texts of one answer


async def predict_spans(
    context: RequestContext, engine: TensorEngine, inputs: Any, parameters: PredictParameters
) -> list[Any] | Answer:
    """Return the entities or filled masks of a text, or of each of a list of texts, or the answer to a question.

    Raises `InputError` for inputs of another task's form.
    """
    if engine.predictor.task == "question-answering":
        return await _answers(context, engine, inputs, parameters)
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError("expected a text, or a list of texts", where="inputs")
    if not 1 <= len(texts) <= MAX_TEXTS:
        raise InputError(f"expected 1 to {MAX_TEXTS} texts, got {len(texts)}", where="inputs")
    of_texts = _masks if engine.predictor.task == "fill-mask" else _entities
    found = await of_texts(context, engine, texts, parameters)
    return found[0] if isinstance(inputs, str) else found


async def _answers(
    context: RequestContext, engine: TensorEngine, asked: Any, parameters: PredictParameters
) -> list[Answer] | Answer:
    if not isinstance(asked, Question) or asked.context is None or asked.choices is not None:
        raise InputError("expected an object with question and context", where="inputs")
    rows, outputs = await _run(
        context, engine, await _encode(context, engine, [asked.context], asked.question)
    )
    pairs = list(zip(outputs["start_logits"], outputs["end_logits"], rows, strict=True))
    top, longest = parameters.top_k or 1, parameters.max_answer_len or text_answers.LONGEST_SPAN
    found = text_answers.best_spans(pairs, asked.context, top=top, longest=longest)
    return found if top > 1 else found[0]


async def _entities(
    context: RequestContext, engine: TensorEngine, texts: list[str], parameters: PredictParameters
) -> list[Any]:
    strategy = parameters.aggregation_strategy or "simple"
    if strategy not in STRATEGIES:
        raise InputError(
            f"expected one of {', '.join(STRATEGIES)}, got {strategy!r}",
            where="parameters.aggregation_strategy",
        )
    rows, outputs = await _run(context, engine, await _encode(context, engine, texts, None))
    labels = list((engine.predictor.manifest.meta or {}).get("labels") or ())
    ignored = text_answers.OUTSIDE if parameters.ignore_labels is None else parameters.ignore_labels
    triples = zip(outputs["logits"], rows, texts, strict=True)
    if strategy == "none":
        return [text_answers.token_labels(one, row, labels, ignored=ignored) for one, row, _ in triples]
    return [text_answers.entities(one, row, text, labels, ignored=ignored) for one, row, text in triples]


async def _masks(
    context: RequestContext, engine: TensorEngine, texts: list[str], parameters: PredictParameters
) -> list[Any]:
    """Return the best tokens of the mask of each text; of each of its masks where it has several."""
    meta = engine.predictor.manifest.meta or {}
    token = str(meta.get("mask_token", "[MASK]"))
    targets = [parameters.targets] if isinstance(parameters.targets, str) else parameters.targets
    mask_id, *wanted = await _token_ids(engine, [token, *(targets or ())])
    for index, number in enumerate(wanted):
        if number is None:
            raise InputError(
                "expected a token of the vocabulary", where=f"parameters.targets[{index}]",
                hint="It is spelled as in the model's tokenizer.json",
            )  # fmt: skip
    rows, top = await _encode(context, engine, texts, None), parameters.top_k or TOP
    masks = [row.ids.count(mask_id) for row in rows]
    if 0 in masks:
        raise InputError(f"expected a text with {token} in it", where=f"inputs[{masks.index(0)}]")
    size = sum(top * count * len(row.ids) for row, count in zip(rows, masks, strict=True))
    if size > MAX_FILLED:
        raise InputError(
            f"the filled texts have {size} tokens, at most are {MAX_FILLED}", where="parameters.top_k"
        )
    found: list[list[list[FilledMask]]] = []
    for start in range(0, len(rows), ROWS_AT_ONCE):
        part, outputs = await _run(context, engine, rows[start : start + ROWS_AT_ONCE])
        options = {
            "top": top,
            "targets": None if targets is None else [number for number in wanted if number is not None],
            "pad_id": meta.get("pad_id"),
        }
        found += await in_thread(context, _filled, outputs["logits"], part, mask_id, options)
    each = [one for text in found for mask in text for one in mask]
    said = iter(
        await _decoded(engine, [row for one in each for row in (([one.token], False), (one.ids, one.alone))])
    )
    answers = [[[one.answer(next(said), next(said)) for one in mask] for mask in text] for text in found]
    return [text[0] if len(text) == 1 else text for text in answers]


def _filled(
    logits: np.ndarray, rows: Sequence[Any], mask_id: int, options: Mapping[str, Any]
) -> list[list[list[FilledMask]]]:
    pairs = zip(logits, rows, strict=True)
    return [text_answers.filled_masks(one, row.ids, mask_id, **options) for one, row in pairs]


async def _token_ids(engine: TensorEngine, tokens: list[str]) -> list[int | None]:
    if engine.texts is not None:
        return await engine.texts.find_tokens(tokens)
    return [engine.predictor.tokenizer.token_id(token) for token in tokens]


async def _decoded(engine: TensorEngine, rows: list[tuple[list[int], bool]]) -> list[str]:
    if engine.texts is not None:
        return await engine.texts.decode_rows(rows)
    return [engine.predictor.tokenizer.decode(*row) for row in rows]


async def _encode(
    context: RequestContext, engine: TensorEngine, texts: Sequence[str], question: str | None
) -> list[Any]:
    """Tokenize texts, or the windows of a context: an encoding of each."""
    engine.check_admission(
        timeout=context.timeout(), tenant=queue_tenant_of(context.service, context.headers)
    )
    if engine.texts is not None:
        return list(await engine.texts.encode_spans(texts, question, "inputs"))
    encode = engine.predictor.tokenizer.span_encodings
    return await asyncio.get_running_loop().run_in_executor(context.service.pool, encode, texts, question)


async def _run(
    context: RequestContext, engine: TensorEngine, rows: Sequence[Any]
) -> tuple[Sequence[Any], Arrays]:
    """Run encodings: the same, and the outputs of each."""
    tenant, timeout = queue_tenant_of(context.service, context.headers), context.timeout()
    pad = engine.predictor.pad if engine.texts is not None else engine.predictor.tokenizer.pad
    padded = pad([row.ids for row in rows], [row.type_ids for row in rows])
    found = await text_inputs.infer_rows(engine, padded, timeout=timeout, tenant=tenant)
    context.measure = found.timings
    for name, values in found.outputs.items():
        if wrong := int((~np.isfinite(values)).sum()):
            raise NonfiniteError(name, wrong)
    return rows, found.outputs
