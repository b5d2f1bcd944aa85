"""Model of texts as its tasks see it, and its outputs for texts: labels, vectors, scores of pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..artifact.model_info import ModelInfo
from ..llm.text.embedding_prompts import in_lower_case, with_prompt
from ..llm.text.tokenizer import TextOrPair
from . import late_interaction
from .answers import Answer, label_scores
from .late_interaction import LateInteraction
from .score_activation import activation_of, scores_of
from .steps import Encode, RunRows, RunTexts, Steps

# Names of the prompts of an embedding model, of which the first known one is put before a query or a document.
QUERY_PROMPTS, DOCUMENT_PROMPTS = ("query",), ("document", "passage", "corpus")


class TextModel(NamedTuple):
    """Facts of an artifact: `output`, `width`: name and last size of the first output; `longest`: tokens of a text."""

    name: str
    task: str
    meta: Mapping[str, Any]
    output: str
    width: int
    longest: int

    @classmethod
    def of(cls, info: ModelInfo) -> TextModel:
        """Return the facts that tasks of texts need of an opened model."""
        meta, first = info.meta, info.outputs[0]
        longest = min(int(meta.get("max_length", 10**9)), info.sizes.get("seq", (1, 512))[1])
        width = first.shape[-1] if first.shape and isinstance(first.shape[-1], int) else 0
        return cls(info.name, info.task, meta, first.name, width, longest)

    @property
    def labels(self) -> list[str]:
        """Names of the classes, LABEL_0 and so on where the artifact does not name all of them."""
        named = list(self.meta.get("labels") or ())
        return named if len(named) == self.width else [f"LABEL_{index}" for index in range(self.width)]

    @property
    def pad_id(self) -> int:
        return int(self.meta.get("pad_id") or 0)

    @property
    def scores_pairs(self) -> bool:
        """True for a cross-encoder: a classifier of one label."""
        return self.task == "classification" and self.width == 1

    def lower(self, texts: Sequence[str]) -> list[str]:
        """Return texts in lower case where the model was trained so."""
        return [str(in_lower_case(text)) for text in texts] if self.meta.get("lower_case") else list(texts)

    def activated(self, logits: np.ndarray, activation: str | None = None) -> np.ndarray:
        """Return scores of logits [rows, labels], by the model's own activation unless another is named."""
        return scores_of(logits, activation or activation_of(self.meta, logits.shape[1]))


def run_texts(
    model: TextModel, texts: Sequence[TextOrPair], where: str, *, prompt_name: str | None = None
) -> Steps[np.ndarray]:
    """Return the first output of texts or pairs, float32 [len(texts), width]; texts stand after the model's prompt."""
    outputs = yield RunTexts(with_prompt(texts, model.meta, prompt_name), (model.output,), where)
    return np.asarray(outputs[model.output], dtype=np.float32).reshape(len(texts), model.width)


def classify(
    model: TextModel,
    texts: Sequence[TextOrPair],
    where: str,
    *,
    top: int | None = None,
    activation: str | None = None,
) -> Steps[list[list[Answer]]]:
    """Return the labels of each text or pair with their scores, best first."""
    logits = yield from run_texts(model, texts, where)
    named = activation or activation_of(model.meta, logits.shape[1])
    return [label_scores(row, model.labels, named, top) for row in logits]


def embed_tokens(
    model: TextModel, texts: Sequence[str], roles: Sequence[str], where: str
) -> Steps[list[np.ndarray]]:
    """Return the vectors of the tokens of each text by late interaction, float32 [tokens, dim]; `roles`: of each."""
    rules = LateInteraction.of(model.meta)
    prompted = [rules.text(text, role) for text, role in zip(texts, roles, strict=True)]
    ids = yield Encode(model.lower(prompted), where)
    rows = [rules.row(one, role, model.longest) for one, role in zip(ids, roles, strict=True)]
    outputs = yield RunRows(
        [row.ids for row in rows],
        (late_interaction.OUTPUT,),
        attended=[row.attended for row in rows],
    )
    return late_interaction.compared_vectors(outputs[late_interaction.OUTPUT], rows)


def compare(model: TextModel, first: Sequence[str], second: Sequence[str], where: str) -> Steps[np.ndarray]:
    """Return how texts of `first`, one or as many, fit those of `second`: float32 [len(second)], the best the largest.

    A cross-encoder gives logits of the pair, an embedding model the cosine, a late-interaction model MaxSim.
    """
    if model.task == late_interaction.TASK:
        roles = [*("query" for _ in first), *("document" for _ in second)]
        vectors = yield from embed_tokens(model, [*first, *second], roles, where)
        queries, documents, rules = (
            vectors[: len(first)],
            vectors[len(first) :],
            LateInteraction.of(model.meta),
        )
        if len(queries) == 1:
            return rules.scores(queries[0], documents)
        pairs = zip(queries, documents, strict=True)
        return np.concatenate([rules.scores(query, [document]) for query, document in pairs])
    if model.task == "embedding":
        known = model.meta.get("prompts") or {}
        query, document = (
            next((name for name in names if name in known), None)
            for names in (QUERY_PROMPTS, DOCUMENT_PROMPTS)
        )
        texts = [*with_prompt(first, model.meta, query), *with_prompt(second, model.meta, document)]
        outputs = yield RunTexts(texts, (model.output,), where)
        rows = np.asarray(outputs[model.output], dtype=np.float32)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        cosines: np.ndarray = (rows[: len(first)] * rows[len(first) :]).sum(axis=1, dtype=np.float32)
        return cosines
    couples = [(first[i if len(first) > 1 else 0], text) for i, text in enumerate(second)]
    logits = yield from run_texts(model, couples, where)
    return logits[:, 0]


def pair_scores(model: TextModel, compared: np.ndarray) -> np.ndarray:
    """Return what `compare` gave with the activation of a cross-encoder; other scores have none."""
    return model.activated(compared[:, None])[:, 0] if model.scores_pairs else compared


def best_first(compared: np.ndarray, top: int | None = None) -> list[int]:
    """Return the places of what `compare` gave, best first.

    By logits: a sigmoid in float32 is 1.0 for every logit above 17.
    """
    return [int(place) for place in np.argsort(-compared, kind="stable")[:top]]
