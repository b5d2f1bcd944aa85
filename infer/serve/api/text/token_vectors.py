"""Vectors of tokens by late-interaction models (ColBERT), and their MaxSim."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from ....llm.text.embedding_prompts import in_lower_case
from ....tasks import late_interaction
from ....tasks.late_interaction import LateInteraction
from ...batching import text_inputs
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext, queue_tenant_of
from ...http.routing import NonfiniteError
from . import text_request

TASK = late_interaction.TASK


async def embed_tokens(
    context: RequestContext, engine: TensorEngine, texts: Sequence[tuple[str, str]], where: str
) -> tuple[list[np.ndarray], int]:
    """Return the vectors of pairs of a text and its role, float32 [tokens, dim] of each, and the number of tokens."""
    text_request.check_texts(context, [text for text, _ in texts], where)
    tenant, timeout = queue_tenant_of(context.service, context.headers), context.timeout()
    engine.check_admission(timeout=timeout, tenant=tenant)
    predictor = engine.predictor
    meta = predictor.manifest.meta or {}
    rules = LateInteraction.of(meta)
    prompted = [rules.text(text, role) for text, role in texts]
    if meta.get("lower_case"):
        prompted = [str(in_lower_case(text)) for text in prompted]
    if engine.texts is not None:
        ids, _ = await engine.texts.encode_typed(prompted, where)
    else:
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(context.service.pool, predictor.tokenizer.encode, prompted)
    longest = predictor.tokenizer.max_length
    rows = [rules.row(one, role, longest) for one, (_, role) in zip(ids, texts, strict=True)]
    given = late_interaction.arrays_of(rows, int(meta.get("pad_id") or 0))
    answer = await text_inputs.infer_rows(engine, given, timeout=timeout, tenant=tenant)
    context.measure = answer.timings
    found = late_interaction.compared_vectors(answer.outputs[late_interaction.OUTPUT], rows)
    if wrong := sum(int((~np.isfinite(one)).sum()) for one in found):
        raise NonfiniteError(late_interaction.OUTPUT, wrong)
    engine.metrics.prompt_tokens.inc(used := sum(len(row.ids) for row in rows))
    return found, used


async def compare(
    context: RequestContext, engine: TensorEngine, first: list[str], second: list[str], where: str
) -> tuple[np.ndarray, int]:
    """Return MaxSim of queries, one or as many, with documents, float32 [len(second)], and the number of tokens."""
    texts = [*((text, "query") for text in first), *((text, "document") for text in second)]
    vectors, used = await embed_tokens(context, engine, texts, where)
    queries, documents = vectors[: len(first)], vectors[len(first) :]
    rules = LateInteraction.of(engine.predictor.manifest.meta or {})
    if len(queries) == 1:
        return rules.scores(queries[0], documents), used
    pairs = zip(queries, documents, strict=True)
    return np.concatenate([rules.scores(query, [document]) for query, document in pairs]), used
