"""JSON schemas of reranking and scoring: Cohere's and Jina's, vLLM's, and TEI's.

TEI is Hugging Face's text-embeddings-inference. Unknown fields are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ...task_call import TextUsage


class Document(msgspec.Struct):
    """A document that is an object, as Cohere and Jina have it."""

    text: str


class RerankRequest(msgspec.Struct, kw_only=True):
    """Body of the rerank routes: `documents` as Cohere, Jina and vLLM name them, or `texts` as TEI does.

    `top_n`: only the best so many; `return_documents`, `return_text`: repeat each document in its result;
    `raw_scores`: TEI's, without the model's activation; `model` may be absent where one such model is served.
    """

    query: str
    documents: list[str | Document] | None = None
    texts: list[str] | None = None
    model: str | None = None
    top_n: Annotated[int, msgspec.Meta(ge=0)] | None = None
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = False
    truncate: bool = True


class RerankResult(msgspec.Struct, omit_defaults=True):
    """A document's place in the request, and its score; results are sorted, best first."""

    index: int
    relevance_score: float
    document: Document | None = None


class BilledUnits(msgspec.Struct):
    search_units: int = 1


class RerankMeta(msgspec.Struct):
    """Cohere's accounting of a request; nothing is billed here."""

    billed_units: BilledUnits = msgspec.field(default_factory=BilledUnits)


class Reranked(msgspec.Struct):
    id: str
    model: str
    results: list[RerankResult]
    usage: TextUsage
    meta: RerankMeta = msgspec.field(default_factory=RerankMeta)


class RankedText(msgspec.Struct, omit_defaults=True):
    """TEI's result of a text."""

    index: int
    score: float
    text: str | None = None


class ScoreRequest(msgspec.Struct, kw_only=True):
    """Body of /score, as vLLM has it: one text against one or many, or as many against as many.

    `use_activation`: false gives logits; `model` may be absent where one such model is served.
    """

    text_1: str | list[str]
    text_2: str | list[str]
    model: str | None = None
    use_activation: bool = True


class Score(msgspec.Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: TextUsage
    object: Literal["list"] = "list"
