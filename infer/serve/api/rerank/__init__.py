"""Reranking and scores of pairs of texts: Cohere, Jina, vLLM, TEI."""

from __future__ import annotations

from ...http.routing import Route
from ...service import Service
from ..openai.openai_errors import ERROR_FORMAT
from . import rerank
from .rerank_types import RankedText, Reranked, RerankRequest, ScoreRequest, Scores


def routes(service: Service) -> list[Route]:
    ranked, summary, pairs = (
        Reranked | list[RankedText],
        "Documents by relevance to a query",
        "Scores of pairs of texts",
    )
    return [
        *(
            Route(
                "POST", path, RerankRequest, ranked, rerank.rerank, summary, ERROR_FORMAT, (429,), work=True
            )
            for path in ("/rerank", "/v1/rerank", "/v2/rerank")
        ),
        *(
            Route("POST", path, ScoreRequest, Scores, rerank.score, pairs, ERROR_FORMAT, (429,), work=True)
            for path in ("/score", "/v1/score")
        ),
    ]
