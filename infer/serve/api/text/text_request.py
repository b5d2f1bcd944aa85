"""Requests of texts for tensor models: which model answers, and the parameters that its task has."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ....errors import InputError, NotFoundError
from ....spec import ZERO_SHOT_IMAGES
from ...batching.tensor_engine import TensorEngine
from ...http.request_context import RequestContext
from ..openai.openai_errors import find_model
from .text_types import PredictRequest

# Parameters of /predict by task.
_LABELS = ("top_k", "function_to_apply")
PARAMETERS: dict[str, tuple[str, ...]] = {
    "classification": (*_LABELS, "candidate_labels", "hypothesis_template", "multi_label"),
    "image-classification": _LABELS,
    "audio-classification": _LABELS,
    ZERO_SHOT_IMAGES: ("top_k", "candidate_labels", "hypothesis_template"),
    "object-detection": ("top_k", "threshold"),
    "token-classification": ("aggregation_strategy", "ignore_labels"),
    "question-answering": ("top_k", "max_answer_len"),
    "fill-mask": ("top_k", "targets"),
    "multiple-choice": ("top_k",),
    "image-to-text": ("text",),
}


def find_text_model(
    context: RequestContext, name: str | None, tasks: Sequence[str], purpose: str
) -> TensorEngine:
    """Return the engine of a model of one of these tasks; without a name, the only one that is served.

    Raises `NotFoundError`, and `InputError` for a model of another task or for a choice that the request leaves open.
    """
    if name is None:
        names = [n for n, engine in context.service.engines.items() if engine.info.task in tasks]
        if not names:
            raise NotFoundError(f"no model that can {purpose} is served", hint="/v2/models lists the models")
        if len(names) > 1:
            raise InputError(f"expected a model, one of {', '.join(names)}", where="model")
        name = names[0]
    engine = find_model(context, name)
    if not isinstance(engine, TensorEngine) or engine.info.task not in tasks:
        raise InputError(f"{name} is a {engine.info.task} model and can't {purpose}", where="model")
    return engine


def new_id(kind: str) -> str:
    """Return a new id of a response, such as `rerank-` and 24 hexadecimal digits."""
    return f"{kind}-{os.urandom(12).hex()}"


def refuse_uncut(truncate: bool) -> None:
    """Raise `InputError` for a request that wants long texts refused, which is not offered."""
    if not truncate:
        raise InputError(
            "texts longer than the model reads are always cut", where="truncate", hint="Leave truncate out"
        )


def check_parameters(task: str, request: PredictRequest) -> None:
    """Raise `InputError` for a parameter of a prediction that the model's task has not."""
    known = PARAMETERS.get(task, ())
    for name in request.parameters.__struct_fields__:
        if getattr(request.parameters, name) is not None and name not in known:
            kind = f"takes {', '.join(known)}" if known else "takes none"
            raise InputError(f"a {task} model has no parameter {name}; it {kind}", where=f"parameters.{name}")
    if request.raw_scores and "function_to_apply" not in known and task != "multiple-choice":
        raise InputError(f"a {task} model has no raw scores", where="raw_scores", hint="Leave raw_scores out")
