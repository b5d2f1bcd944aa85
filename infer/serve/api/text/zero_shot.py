"""Zero-shot classification of texts by models of entailment, as Hugging Face's inference API asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ....errors import InputError
from ....llm.text.tokenizer import TextOrPair
from ....tasks import zero_shot_text
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext
from . import text_request
from .text_types import LabelScore, Predictions, PredictRequest


async def classify(
    context: RequestContext, engine: TensorEngine, request: PredictRequest, model_labels: Sequence[str]
) -> Predictions:
    """Return the candidate labels of a text with their scores, best first; of a list of texts, a list of them."""
    given = request.parameters
    if request.raw_scores or given.function_to_apply is not None:
        raise InputError(
            "scores of candidate_labels have one activation", where="parameters.function_to_apply"
        )
    labels, sentences = zero_shot_text.hypotheses(
        given.candidate_labels, given.hypothesis_template, "parameters"
    )
    entailed = zero_shot_text.entailment(model_labels, "parameters.candidate_labels")
    texts: Any = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not all(isinstance(text, str) for text in texts):
        raise InputError("expected a text or a list of texts with candidate_labels", where="inputs")
    pairs: list[TextOrPair] = [(text, sentence) for text in texts for sentence in sentences]
    logits, _ = await text_request.run_texts(context, engine, pairs, where="inputs")
    found = []
    for rows in logits.reshape(len(texts), len(labels), -1):
        scores = zero_shot_text.candidate_scores(rows, entailed, labels, multi_label=bool(given.multi_label))
        found.append([LabelScore(one["score"], one["label"]) for one in scores[: given.top_k]])
    return [*found[0]] if isinstance(request.inputs, str) else [[*one] for one in found]
