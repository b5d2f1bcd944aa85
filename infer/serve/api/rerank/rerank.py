"""Reranking and scores of pairs: /rerank as Cohere, Jina, vLLM and TEI have it, and vLLM's /score.

A cross-encoder scores the pair; an embedding model gives the cosine of the two embeddings, a late-interaction model
(ColBERT) the MaxSim of their tokens.
"""

from __future__ import annotations

import time

from ....errors import InputError
from ....tasks import late_interaction, text_model
from ...http.json_parse import require_json
from ...http.request_context import RequestContext
from ...http.routing import new_id
from ...model_lookup import find_tensor_model
from ...task_call import TaskCall, refuse_uncut
from .rerank_types import (
    Document,
    RankedText,
    Reranked,
    RerankRequest,
    RerankResult,
    Score,
    ScoreRequest,
    Scores,
)

TASKS = ("classification", "embedding", late_interaction.TASK)


async def rerank(context: RequestContext) -> Reranked | list[RankedText]:
    require_json(context.headers)
    request = context.json(RerankRequest)
    if (request.documents is None) == (request.texts is None):
        raise InputError("expected either documents (Cohere, Jina, vLLM) or texts (TEI)", where="documents")
    where = "documents" if request.texts is None else "texts"
    given = request.texts if request.texts is not None else request.documents or []
    documents = [one.text if isinstance(one, Document) else one for one in given]
    refuse_uncut(request.truncate)
    call = _call(context, request.model)
    call.check_texts([request.query], "query")
    call.check_texts(documents, where)
    raw = await call.perform(text_model.compare(call.model, [request.query], documents, where))
    order = text_model.best_first(raw, request.top_n or None)
    scores = raw if request.raw_scores else text_model.pair_scores(call.model, raw)
    if request.texts is not None:
        return [RankedText(i, float(scores[i]), documents[i] if request.return_text else None) for i in order]
    return Reranked(
        id=new_id("rerank-"),
        model=call.model.name,
        results=[
            RerankResult(i, float(scores[i]), Document(documents[i]) if request.return_documents else None)
            for i in order
        ],
        usage=call.usage,
    )


async def score(context: RequestContext) -> Scores:
    require_json(context.headers)
    request = context.json(ScoreRequest)
    first = [request.text_1] if isinstance(request.text_1, str) else request.text_1
    second = [request.text_2] if isinstance(request.text_2, str) else request.text_2
    if len(first) != len(second) and len(first) != 1:
        raise InputError(
            f"expected one text or as many as text_2, which has {len(second)}, got {len(first)}",
            where="text_1",
        )
    call = _call(context, request.model)
    call.check_texts(first, "text_1")
    call.check_texts(second, "text_2")
    raw = await call.perform(text_model.compare(call.model, first, second, "text_2"))
    scores = text_model.pair_scores(call.model, raw) if request.use_activation else raw
    data = [Score(index, value) for index, value in enumerate(scores.tolist())]
    return Scores(new_id("score-"), int(time.time()), call.model.name, data, call.usage)


def _call(context: RequestContext, name: str | None) -> TaskCall:
    engine = find_tensor_model(context, name, TASKS, "compare texts")
    call = TaskCall(context, engine)
    if call.model.task == "classification" and not call.model.scores_pairs:
        raise InputError(
            f"{call.model.name} has {call.model.width} labels and does not score pairs of texts",
            where="model",
            hint="A cross-encoder has one label; classifiers are served at /classify",
        )
    return call
