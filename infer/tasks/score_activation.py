"""Scores of a classifier's logits, by the activation that its configuration names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np


def activation_of(meta: Mapping[str, Any], labels: int) -> str:
    """Return sigmoid, softmax, tanh or identity: the one of the manifest, else by the number of labels.

    One label has a sigmoid and several a softmax, except for the problem types of transformers: regression has none,
    and multi_label_classification a sigmoid.
    """
    if named := meta.get("activation"):
        return str(named)
    problem = meta.get("problem_type")
    if problem == "regression":
        return "identity"
    return "sigmoid" if labels == 1 or problem == "multi_label_classification" else "softmax"


def scores_of(logits: np.ndarray, activation: str) -> np.ndarray:
    """Apply an activation to logits [rows, labels]: float32 [rows, labels]."""
    values = logits.astype(np.float32, copy=False)
    if activation == "softmax":
        shifted = np.exp(values - values.max(axis=-1, keepdims=True))
        return shifted / shifted.sum(axis=-1, keepdims=True)
    if activation == "sigmoid":
        e = np.exp(-np.abs(values))  # does not overflow
        return np.where(values >= 0, 1 / (1 + e), e / (1 + e)).astype(np.float32)
    return np.tanh(values) if activation == "tanh" else values
