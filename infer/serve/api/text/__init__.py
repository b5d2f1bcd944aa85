"""Texts for tensor models: reranking and scores (Cohere, Jina, vLLM, TEI), labels and other predictions (TEI, vLLM)."""

from __future__ import annotations

from typing import Any

from ...http.multipart import FORM
from ...http.routing import JSON, Handler, Payload, Route
from ...service import Service
from ..openai.openai_errors import ERROR_FORMAT
from . import classify, rerank
from .text_types import (
    ANSWERS,
    TEI_ERRORS,
    Classified,
    ClassifyRequest,
    Predictions,
    PredictRequest,
    RankedText,
    Reranked,
    RerankRequest,
    ScoreRequest,
    Scores,
)

ACCEPTS = (JSON, FORM, "image/*", "audio/*")


def routes(service: Service) -> list[Route]:
    def post(path: str, In: type[Any], out: Payload, handler: Handler, summary: str, *errors: int) -> Route:
        return Route("POST", path, In, out, handler, summary, ERROR_FORMAT, errors, work=True)

    ranked, labels = Reranked | list[RankedText], Classified | Predictions
    summary = "Documents by relevance to a query"
    paths = ("/rerank", "/v1/rerank", "/v2/rerank")
    pairs = "Scores of pairs of texts"
    return [
        *(post(path, RerankRequest, ranked, rerank.rerank, summary, 429) for path in paths),
        *(post(path, ScoreRequest, Scores, rerank.score, pairs, 429) for path in ("/score", "/v1/score")),
        post(
            "/classify",
            ClassifyRequest,
            labels,
            classify.classify,
            "Labels of texts, images or sound",
            429,
            501,
        ),
        Route(
            "POST",
            "/predict",
            PredictRequest,
            Predictions,
            classify.predict,
            "Labels of texts, pairs, images or sound; entities; answers to questions; texts about images",
            TEI_ERRORS,
            (429, 501),
            work=True,
            accepts=ACCEPTS,
            answers=ANSWERS,
        ),
    ]
