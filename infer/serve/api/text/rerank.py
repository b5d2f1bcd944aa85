"""Reranking and scores of pairs: /rerank as Cohere, Jina, vLLM and TEI have it, and vLLM's /score.

A cross-encoder scores the pair; an embedding model gives the cosine of the two embeddings, a late-interaction model
(ColBERT) the MaxSim of their tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from ....errors import InputError
from ....llm.text.embedding_prompts import with_prompt
from ....llm.text.tokenizer import TextOrPair
from ....tasks.score_activation import activation_of, scores_of
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext
from ...http.routing import NonfiniteError
from ..openai.openai_errors import require_json
from . import text_request, token_vectors
from .text_types import (
    Document,
    RankedText,
    Reranked,
    RerankRequest,
    RerankResult,
    Score,
    ScoreRequest,
    Scores,
    TextUsage,
)

TASKS = ("classification", "embedding", token_vectors.TASK)
QUERY, DOCUMENT = (
    ("query",),
    ("document", "passage", "corpus"),
)  # names of prompts, the first known one is used


async def rerank(context: RequestContext) -> Reranked | list[RankedText]:
    require_json(context)
    request = context.json(RerankRequest)
    if (request.documents is None) == (request.texts is None):
        raise InputError("expected either documents (Cohere, Jina, vLLM) or texts (TEI)", where="documents")
    where = "documents" if request.texts is None else "texts"
    given = request.texts if request.texts is not None else request.documents or []
    documents = [one.text if isinstance(one, Document) else one for one in given]
    text_request.refuse_uncut(request.truncate)
    engine = _engine(context, request.model)
    raw, used = await _raw_scores(context, engine, [request.query], documents, where)
    # By logits: a sigmoid in float32 is 1.0 for every logit above 17.
    order = np.argsort(-raw, kind="stable")[: request.top_n or None].tolist()
    scores = raw if request.raw_scores else _activated(engine, raw)
    if request.texts is not None:
        return [RankedText(i, float(scores[i]), documents[i] if request.return_text else None) for i in order]
    return Reranked(
        id=text_request.new_id("rerank"),
        model=engine.predictor.name,
        results=[
            RerankResult(i, float(scores[i]), Document(documents[i]) if request.return_documents else None)
            for i in order
        ],
        usage=TextUsage(used, used),
    )


async def score(context: RequestContext) -> Scores:
    require_json(context)
    request = context.json(ScoreRequest)
    first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(first) != len(second) and len(first) != 1:
        raise InputError(
            f"expected one text or as many as text_2, which has {len(second)}, got {len(first)}",
            where="text_1",
        )
    engine = _engine(context, request.model)
    raw, used = await _raw_scores(context, engine, first, second, "text_2")
    scores = _activated(engine, raw) if request.use_activation else raw
    data = [Score(index, value) for index, value in enumerate(scores.tolist())]
    return Scores(
        text_request.new_id("score"), int(time.time()), engine.predictor.name, data, TextUsage(used, used)
    )


def _engine(context: RequestContext, name: str | None) -> TensorEngine:
    engine = text_request.find_text_model(context, name, TASKS, "compare texts")
    if engine.predictor.task == "classification" and text_request.labels_of(engine) != 1:
        raise InputError(
            f"{engine.predictor.name} has {text_request.labels_of(engine)} labels and does not score pairs of texts",
            where="model",
            hint="A cross-encoder has one label; classifiers are served at /classify",
        )
    return engine


async def _raw_scores(
    context: RequestContext, engine: TensorEngine, first: list[str], second: list[str], where: str
) -> tuple[np.ndarray, int]:
    """Return logits, cosines or MaxSim of texts of `first`, one or as many, with texts of `second`; and the tokens.

    The first is float32 [len(second)].
    """
    if engine.predictor.task == "embedding":
        scores, used = await _cosines(context, engine, first, second, where)
    elif engine.predictor.task == token_vectors.TASK:
        scores, used = await token_vectors.compare(context, engine, first, second, where)
    else:
        pairs: list[TextOrPair] = [(first[i if len(first) > 1 else 0], text) for i, text in enumerate(second)]
        logits, used = await text_request.run_texts(context, engine, pairs, where=where)
        scores = logits[:, 0]
    if wrong := int((~np.isfinite(scores)).sum()):  # has no place in an order
        raise NonfiniteError(engine.predictor.outputs[0].name, wrong)
    return scores, used


def _activated(engine: TensorEngine, scores: np.ndarray) -> np.ndarray:
    if engine.predictor.task != "classification":
        return scores
    return scores_of(scores[:, None], activation_of(engine.predictor.manifest.meta or {}, 1))[:, 0]


async def _cosines(
    context: RequestContext, engine: TensorEngine, first: list[str], second: list[str], where: str
) -> tuple[np.ndarray, int]:
    meta = engine.predictor.manifest.meta or {}
    texts = [
        *with_prompt(first, meta, _known(meta.get("prompts"), QUERY)),
        *with_prompt(second, meta, _known(meta.get("prompts"), DOCUMENT)),
    ]
    vectors, used = await text_request.run_texts(context, engine, texts, where=where, prompted=True)
    vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return (vectors[: len(first)] * vectors[len(first) :]).sum(axis=1, dtype=np.float32), used


def _known(prompts: dict[str, str] | None, names: Sequence[str]) -> str | None:
    return next((name for name in names if name in (prompts or {})), None)
