"""Answers of tasks from output tensors: labels with scores, boxes and areas, ready for JSON; see also text_answers.

Each function takes the outputs of one row as NumPy arrays and gives what transformers' pipeline of the task gives.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import InputError
from .score_activation import scores_of

TOP = 5  # labels, or tokens of a mask, in an answer
TEMPLATE = "This is a photo of {}."  # as transformers' pipeline has it
THRESHOLD = 0.5  # smallest score of a detected object
Answer = dict[str, Any]


def softmax(values: np.ndarray) -> np.ndarray:
    """Return probabilities over the last axis, in float64."""
    shifted = np.exp(values.astype(np.float64) - values.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def name_of(labels: Sequence[str], index: int) -> str:
    """Return the label of a class, LABEL_0 where the model names none."""
    return labels[index] if index < len(labels) else f"LABEL_{index}"


def label_scores(
    logits: np.ndarray, labels: Sequence[str], activation: str, top: int | None = TOP
) -> list[Answer]:
    """Return labels with scores, best first, from logits [labels] and the activation that makes scores of them."""
    scores = scores_of(logits[None], activation)[0]
    order = np.argsort(-scores, kind="stable")[:top]
    return [{"label": name_of(labels, int(i)), "score": float(scores[i])} for i in order]


def boxes(
    logits: np.ndarray,
    centers: np.ndarray,
    size: tuple[int, int],
    labels: Sequence[str],
    threshold: float = THRESHOLD,
) -> list[Answer]:
    """Return objects with boxes in pixels, best first.

    `logits` [queries, labels + 1], the last class being no object (DETR, YOLOS), or [queries, labels] with a sigmoid
    for each class, where a query may have several (Deformable DETR, RT-DETR); `centers` [queries, 4] hold the middle,
    width and height relative to the image, whose `size` is (height, width).
    """
    if logits.shape[1] == len(labels):
        scores = scores_of(logits, "sigmoid")
        best = [int(i) for i in np.argsort(-scores, axis=None, kind="stable")[: len(scores)]]
        pairs = [divmod(i, scores.shape[1]) for i in best]
    else:
        scores = softmax(logits)[:, :-1]
        pairs = [
            (int(query), int(scores[query].argmax())) for query in np.argsort(-scores.max(-1), kind="stable")
        ]
    return [
        {
            "label": name_of(labels, kind),
            "score": float(scores[query, kind]),
            "box": _corners(centers[query], size),
        }
        for query, kind in pairs
        if scores[query, kind] > threshold
    ]


def _corners(center: np.ndarray, size: tuple[int, int]) -> dict[str, int]:
    x, y, w, h = (float(value) for value in center)
    height, width = size
    return {
        "xmin": int((x - w / 2) * width),
        "ymin": int((y - h / 2) * height),
        "xmax": int((x + w / 2) * width),
        "ymax": int((y + h / 2) * height),
    }


def class_areas(logits: np.ndarray, labels: Sequence[str]) -> list[Answer]:
    """Return the classes of a segmented image with their share of the area, largest first, from logits [C, H, W]."""
    counts = np.bincount(logits.argmax(0).reshape(-1), minlength=logits.shape[0])
    order = [int(i) for i in np.argsort(-counts, kind="stable") if counts[i]]
    return [{"label": name_of(labels, i), "area": float(counts[i] / counts.sum())} for i in order]


def class_map(logits: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return the class of each pixel of an image of `size`, int64 [height, width], from logits [C, H, W].

    Logits are interpolated like `torch.nn.functional.interpolate(mode="bilinear", align_corners=False)`.
    """
    (low_y, high_y, y), (low_x, high_x, x) = (
        _neighbours(have, want) for have, want in zip(logits.shape[1:], size, strict=True)
    )
    found = np.zeros(size, dtype=np.int64)
    best = np.full(size, -np.inf, dtype=np.float32)
    for kind, plane in enumerate(logits.astype(np.float32, copy=False)):
        rows = plane[low_y] * (1 - y)[:, None] + plane[high_y] * y[:, None]
        values = rows[:, low_x] * (1 - x) + rows[:, high_x] * x
        better = values > best
        found[better] = kind
        best[better] = values[better]
    return found


def depth_map(depth: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return depth [H, W] at an image's size (height, width), bilinear, float32."""
    (low_y, high_y, y), (low_x, high_x, x) = (
        _neighbours(have, want) for have, want in zip(depth.shape, size, strict=True)
    )
    rows = depth[low_y] * (1 - y)[:, None] + depth[high_y] * y[:, None]
    found: np.ndarray = (rows[:, low_x] * (1 - x) + rows[:, high_x] * x).astype(np.float32)
    return found


def depth_range(depth: np.ndarray) -> Answer:
    """Return the smallest, largest and mean depth of an image, as the model counts it, from depth [H, W]."""
    values = depth.astype(np.float64)
    return {"min": float(values.min()), "max": float(values.max()), "mean": float(values.mean())}


def _neighbours(have: int, want: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the two source positions of each target position, and the weight of the second, float32."""
    place = np.maximum(
        (np.arange(want, dtype=np.float32) + 0.5) * np.float32(have / want) - np.float32(0.5), 0
    )
    low = place.astype(np.int64)
    return low, np.minimum(low + 1, have - 1), place - low


def candidate_texts(labels: Any, template: Any, where: str) -> list[str]:
    """Return the texts that an image is compared with: each label in the place of {} in the template.

    Raises `InputError` unless labels are a list of two texts or more, and the template, None for the usual one, has {}.
    """
    template = TEMPLATE if template is None else template
    if (
        not isinstance(labels, list | tuple)
        or not all(isinstance(label, str) for label in labels)
        or len(labels) < 2
    ):
        raise InputError("expected candidate_labels, at least two texts", where=where)
    if not isinstance(template, str) or "{}" not in template:
        raise InputError("expected a hypothesis_template with {} in it", where=where)
    return [template.replace("{}", label) for label in labels]


def unit_vector(values: np.ndarray) -> Answer:
    """Return an embedding as a list, and its length."""
    return {
        "embedding": [float(value) for value in values],
        "norm": math.sqrt(float(np.square(values).sum())),
    }
