"""Zero-shot classification of texts by a model of entailment (NLI), as transformers' pipeline computes it.

Yin et al., Benchmarking Zero-shot Text Classification, 2019: a text is the premise, each candidate label in a sentence
the hypothesis.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from .answers import Answer, softmax
from .steps import Steps
from .text_model import TextModel, run_texts

TEMPLATE = "This example is {}."


def classify(
    model: TextModel,
    texts: Sequence[str],
    candidates: Any,
    template: Any,
    *,
    multi_label: bool,
    where: str,
    given: str,
) -> Steps[list[list[Answer]]]:
    """Return the candidate labels of each text with their scores, best first, by a model of entailment.

    `where`, `given`: the fields of a request that hold the texts and the candidates.
    """
    labels, sentences = hypotheses(candidates, template, given)
    entailed = entailment(model.labels, f"{given}.candidate_labels")
    logits = yield from run_texts(model, [(text, one) for text in texts for one in sentences], where)
    rows = logits.reshape(len(texts), len(labels), -1)
    return [candidate_scores(row, entailed, labels, multi_label=multi_label) for row in rows]


def hypotheses(labels: Any, template: Any, where: str) -> tuple[list[str], list[str]]:
    """Return the labels, and the sentence of each: the label in the place of {} in the template.

    `labels`: texts, or one text with commas between them. Raises `InputError` for others, and without {}.
    """
    template = TEMPLATE if template is None else template
    listed = [part.strip() for part in labels.split(",")] if isinstance(labels, str) else labels
    if (
        not isinstance(listed, list | tuple)
        or not listed
        or not all(isinstance(x, str) and x for x in listed)
    ):
        raise InputError("expected candidate_labels, at least one text", where=where)
    if not isinstance(template, str) or "{}" not in template:
        raise InputError("expected a hypothesis_template with {} in it", where=where)
    return list(listed), [template.replace("{}", label) for label in listed]


def entailment(labels: Sequence[str], where: str) -> int:
    """Return the place of the model's label of entailment; raise `InputError` for a model of other labels."""
    found = next((i for i, label in enumerate(labels) if label.lower().startswith("entail")), None)
    if found is None:
        shown = ", ".join(labels[:8]) or "none"
        raise InputError(
            f"candidate_labels need a model of entailment, one of whose labels begins with 'entail'; it has {shown}",
            where=where,
        )
    return found


def candidate_scores(
    logits: np.ndarray, entailed: int, labels: Sequence[str], *, multi_label: bool
) -> list[Answer]:
    """Return labels with scores, best first, of logits [labels, classes] of a text with each hypothesis.

    With `multi_label`, or for one label, a score is the probability of entailment against contradiction; else the
    scores of all labels sum to 1.
    """
    values = logits.astype(np.float64)
    if multi_label or len(labels) == 1:
        contradicted = -1 if entailed == 0 else 0
        scores = softmax(values[:, [contradicted, entailed]])[:, 1]
    else:
        scores = softmax(values[:, entailed])
    order = np.argsort(-scores, kind="stable")
    return [{"label": labels[i], "score": float(scores[i])} for i in order.tolist()]
