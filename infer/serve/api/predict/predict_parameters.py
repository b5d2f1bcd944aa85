"""Parameters of /predict, of which each task has some."""

from __future__ import annotations

from ....errors import InputError
from ....spec import ZERO_SHOT_IMAGES
from .predict_types import PredictRequest

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


def check_parameters(task: str, request: PredictRequest) -> None:
    """Raise `InputError` for a parameter of a prediction that the model's task has not."""
    known = PARAMETERS.get(task, ())
    for name in request.parameters.__struct_fields__:
        if getattr(request.parameters, name) is not None and name not in known:
            kind = f"takes {', '.join(known)}" if known else "takes none"
            raise InputError(f"a {task} model has no parameter {name}; it {kind}", where=f"parameters.{name}")
    if request.raw_scores and "function_to_apply" not in known and task != "multiple-choice":
        raise InputError(f"a {task} model has no raw scores", where="raw_scores", hint="Leave raw_scores out")
