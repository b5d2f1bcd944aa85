"""JSON schemas of predictions: vLLM's, TEI's (text-embeddings-inference) and Hugging Face's inference API.

Unknown fields are accepted and ignored.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from ....errors import InferError, InputError
from ....spec import ZERO_SHOT_IMAGES
from ...http.routing import ErrorFormat, error_text
from ...task_call import TextUsage


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """Body of /classify: `input` as vLLM names it, or `inputs` as TEI does, which is answered like /predict.

    `use_activation` (vLLM) and `raw_scores` (TEI): probabilities or logits.
    """

    input: str | list[str] | None = None
    inputs: str | list[str | list[str]] | None = None
    model: str | None = None
    use_activation: bool = True
    raw_scores: bool = False
    truncate: bool = True


class Classification(msgspec.Struct):
    """The best label of a text, and a probability for each label of the model in its order."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class Classified(msgspec.Struct):
    id: str
    created: int
    model: str
    data: list[Classification]
    usage: TextUsage
    object: Literal["list"] = "list"


class PredictParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a prediction, as Hugging Face's inference API has them; one that the task has not is refused.

    `top_k`: labels, objects, answers or tokens of a mask; `threshold`: least score of an object; `function_to_apply`:
    the activation of labels; `aggregation_strategy`: "none" gives tokens, "simple" entities; `ignore_labels`: labels of
    tokens that are no entity; `max_answer_len`: tokens of an answer; `targets`: the only tokens to fill a mask with;
    `candidate_labels`: texts to compare an image with, or that a model of entailment classifies a text by, in the place
    of {} in the `hypothesis_template`; `multi_label`: each of the latter for itself;
    `text`: with which the text about an image begins.
    """

    top_k: Annotated[int, msgspec.Meta(ge=1)] | None = None
    threshold: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = None
    aggregation_strategy: str | None = None
    ignore_labels: list[str] | None = None
    max_answer_len: Annotated[int, msgspec.Meta(ge=1)] | None = None
    targets: str | list[str] | None = None
    candidate_labels: list[str] | None = None
    hypothesis_template: str | None = None
    multi_label: bool | None = None
    text: str | None = None


class Question(msgspec.Struct, kw_only=True):
    """A question with the text that holds its answer (`context`), or with the answers to choose from (`choices`)."""

    question: str
    context: str | None = None
    choices: list[str] | None = None


class PredictRequest(msgspec.Struct, kw_only=True):
    """Body of /predict, as TEI has it, and Hugging Face's inference API for images, sound, masks, entities, questions.

    `inputs`: a text, a pair of texts, or a list of lists that hold a text or a pair each; for a model of images or
    sound a file as base64 or data URL, or a list of them; for a model of entities or masks a text or a list of texts,
    for one that answers questions an object. As a form: `file`, and the other fields by name.
    """

    inputs: str | list[str | list[str]] | Question
    model: str | None = None
    raw_scores: bool = False
    truncate: bool = True
    parameters: PredictParameters = msgspec.field(default_factory=PredictParameters)


# Parameters of /predict, of which each task has some.
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


class Box(msgspec.Struct):
    """Corners of an object in pixels of the image."""

    xmin: int
    ymin: int
    xmax: int
    ymax: int


class LabelScore(msgspec.Struct, omit_defaults=True):
    """A label with its score. `box`: of an object.

    `mask`: of a segmented class, or a depth map, a PNG as base64; its score is null.
    """

    score: float | None
    label: str
    box: Box | None = None
    mask: str | None = None


# Of one input, or of a batch; numbers are the vector of an image.
Predictions = list[LabelScore | float | list[LabelScore | float]]


class GeneratedText(msgspec.Struct):
    """A text about an image, as Hugging Face's image-to-text task names it."""

    generated_text: str


class Entity(msgspec.Struct, omit_defaults=True):
    """An entity of a text (`entity_group`), or the label of a token (`entity`) at `index` of the tokens.

    `start`, `end`: characters of the text.
    """

    score: float
    word: str
    start: int
    end: int
    entity_group: str | None = None
    entity: str | None = None
    index: int | None = None


class AnswerSpan(msgspec.Struct):
    """A part of a context that answers a question; `start`, `end`: its characters."""

    answer: str
    score: float
    start: int
    end: int


class FilledToken(msgspec.Struct):
    """A token in place of a mask, and the text with it."""

    score: float
    token: int
    token_str: str
    sequence: str


# Answers of one input or of a batch; a text of several masks has a list for each of them.
ANSWERS = (
    list[GeneratedText | list[GeneratedText]],
    list[Entity | list[Entity]],
    AnswerSpan,
    list[AnswerSpan],
    list[FilledToken | list[FilledToken | list[FilledToken]]],
)


class TeiError(msgspec.Struct):
    """An error as TEI has it; `error_type`: Validation, Overloaded, Unhealthy or Backend."""

    error: str
    error_type: str


def _tei_body(error: InferError, status: int) -> TeiError:
    kind = {429: "Overloaded", 503: "Unhealthy"}.get(status, "Validation" if status < 500 else "Backend")
    return TeiError(error_text(error), kind)


TEI_ERRORS = ErrorFormat("tei", _tei_body, TeiError, overloaded=429)
