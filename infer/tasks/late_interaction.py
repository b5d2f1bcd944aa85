"""Late interaction (ColBERT): token rows of queries and documents, and their score by MaxSim.

The score of a document is the sum, over the vectors of the query, of the largest product with a vector of the document
(Khattab and Zaharia, 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import InputError

TASK = "multi-vector-embedding"
OUTPUT = "token_embeddings"
ROLES = ("query", "document")
# Names of the role of a text in requests: ours, Jina's and Cohere's.
INPUT_TYPES = {
    **{name: name for name in ROLES},
    **{"search_query": "query", "search_document": "document", "passage": "document"},
}


class TokenRow(NamedTuple):
    """Token ids of a text, which of them others attend to, and which are compared, all of one length."""

    ids: list[int]
    attended: list[int]
    compared: list[bool]


class LateInteraction(NamedTuple):
    """Rules of a model for queries and documents, from `meta["multi_vector"]` of its manifest.

    `markers`: role → token after the first special ones; `lengths`: role → tokens at most; `prompts`: role → text put
    before a text; `skipped`: tokens that are not compared in texts of the roles `skipped_in`; `head`, `tail`: special
    tokens around a text; `expansion`: of queries by {"token", "length", "attend", "cut"}; `mean`: scores are divided by
    the vectors of the query.
    """

    markers: Mapping[str, int]
    lengths: Mapping[str, int]
    prompts: Mapping[str, str]
    skipped: frozenset[int]
    skipped_in: frozenset[str]
    head: int
    tail: int
    expansion: Mapping[str, Any] | None
    mean: bool

    @classmethod
    def of(cls, meta: Mapping[str, Any]) -> LateInteraction:
        """Return the rules of a model of this metadata; raises `InputError` for another kind of model."""
        given = meta.get("multi_vector")
        if given is None:
            raise InputError("the model makes no vectors of tokens", where="model")
        return cls(
            given["markers"], given["lengths"], given["prompts"],
            frozenset(given["skipped"]), frozenset(given["skipped_in"]),
            given["head"], given["tail"], given.get("expansion"), given["mean"],
        )  # fmt: skip

    def text(self, text: str, role: str) -> str:
        """Return a text after the prompt of its role."""
        return self.prompts.get(role, "") + text

    def row(self, ids: Sequence[int], role: str, longest: int) -> TokenRow:
        """Lay out the tokens of a text of a role, special ones included; `longest`: what the model reads at most."""
        marker, limit = self.markers.get(role), min(self.lengths.get(role, longest), longest)
        expansion = self.expansion if role == "query" else None
        if expansion is not None:
            wanted = expansion["length"]
            limit = min(wanted if expansion["cut"] else max(wanted, self.lengths.get(role, longest)), longest)
        marked = [] if marker is None else [marker]
        end = list(ids[len(ids) - self.tail :]) if self.tail else []
        kept = limit - len(marked) - self.tail
        found = [*ids[: self.head], *marked, *ids[self.head : len(ids) - self.tail][: kept - self.head], *end]
        skipped = self.skipped if role in self.skipped_in else frozenset()
        compared = [number not in skipped for number in found]
        attended = [1] * len(found)
        if expansion is not None and (missing := min(expansion["length"], longest) - len(found)) > 0:
            found += [expansion["token"]] * missing
            compared += [expansion["token"] not in skipped] * missing
            attended += [int(expansion["attend"])] * missing
        return TokenRow(found, attended, compared)

    def scores(self, query: np.ndarray, documents: Sequence[np.ndarray]) -> np.ndarray:
        """Return MaxSim of a query [tokens, dim] with each document [tokens, dim], float32 [len(documents)]."""
        found = np.array([max_sim(query, document) for document in documents], dtype=np.float32)
        return found / np.float32(max(len(query), 1)) if self.mean else found


def max_sim(query: np.ndarray, document: np.ndarray) -> float:
    """Return the sum over query vectors of their largest product; 0 where either has no vector."""
    if not len(query) or not len(document):
        return 0.0
    return float((query @ document.T).max(axis=1).sum(dtype=np.float64))


def compared_vectors(outputs: Sequence[np.ndarray], rows: Sequence[TokenRow]) -> list[np.ndarray]:
    """Return the vectors of each row that are compared, float32 [tokens, dim], of its outputs [longest, dim]."""
    return [
        np.ascontiguousarray(one[: len(row.ids)][np.array(row.compared, dtype=bool)], dtype=np.float32)
        for one, row in zip(outputs, rows, strict=True)
    ]


def role_of(name: str | None, where: str) -> str:
    """Return the role of a text that a request names, a document by default; raises `InputError` for other names."""
    found = INPUT_TYPES.get(name or "document")
    if found is None:
        raise InputError(f"expected one of {', '.join(INPUT_TYPES)}, got {name!r}", where=where)
    return found
