"""Predictions of texts, pairs, images and sound: /classify as vLLM has it, and /predict of TEI.

Images and sound come as base64, as a form, or as the body itself, which Hugging Face's InferenceClient sends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import InputError
from ....llm.text.tokenizer import TextOrPair
from ....tasks import answers, text_answers, text_model, zero_shot_text
from ....tasks.answers import Answer
from ... import media_files
from ...batching.tensor_engine import TensorEngine
from ...http.json_parse import require_json
from ...http.multipart import FORM, media_of
from ...http.request_context import RequestContext
from ...http.routing import BINARY, JSON, Response, new_id
from ...model_lookup import find_tensor_model
from ...task_call import TaskCall, refuse_uncut
from . import file_predictions, image_texts
from .file_predictions import ACTIVATIONS, FilePredictions
from .predict_types import (
    Classification,
    Classified,
    ClassifyRequest,
    LabelScore,
    Predictions,
    PredictParameters,
    PredictRequest,
    Question,
    check_parameters,
)

SPANS = ("token-classification", "question-answering", "fill-mask")
TASKS = ("classification", "multiple-choice", *file_predictions.TASKS, *SPANS)
CLASSIFIERS = ("classification", "image-classification", "audio-classification")
STRATEGIES = ("none", "simple")
MAX_SPAN_TEXTS = 1024  # of one request of entities or masks
MAX_FILLED = 1 << 20  # tokens of the filled texts of one answer


async def classify(context: RequestContext) -> Classified | Predictions | Response:
    require_json(context.headers)
    request = context.json(ClassifyRequest)
    if (request.input is None) == (request.inputs is None):
        raise InputError("expected either input (vLLM) or inputs (TEI)", where="input")
    if request.inputs is not None:
        asked = PredictRequest(
            inputs=request.inputs,
            model=request.model,
            raw_scores=request.raw_scores,
            truncate=request.truncate,
        )
        return await _predictions(context, _any_engine(context, request.model), asked)
    texts: list[TextOrPair] = [request.input] if isinstance(request.input, str) else list(request.input or [])
    engine = find_tensor_model(context, request.model, CLASSIFIERS, "classify")
    raw, call = not request.use_activation, TaskCall(context, engine)
    if engine.media is not None:
        files, places, _ = file_predictions.files_of(texts, "input")
        values = await FilePredictions(context, engine, files, places).scores(raw=raw)
    else:
        logits = await call.perform(text_model.run_texts(call.model, texts, "input"))
        values = logits if raw else call.model.activated(logits)
    labels = call.model.labels
    data = [
        Classification(index, labels[int(row.argmax())], row.tolist(), len(labels))
        for index, row in enumerate(values)
    ]
    return Classified(new_id("classify-"), int(time.time()), call.model.name, data, call.usage)


async def predict(context: RequestContext) -> Predictions | Response:
    media = media_of(context.headers)
    if media == FORM:
        form = await media_files.read_form(context)
        if (reader := image_texts.find_engine(context, form.text("model"), TASKS)) is not None:
            text = form.text("text") or ""
            return _texts(await image_texts.describe(context, reader, [form.file("file")], ["file"], text))
        engine = _any_engine(context, form.text("model"))
        parameters = file_predictions.parameters_of(form)
        return await _of_files(context, engine, [form.file("file")], ["file"], parameters)
    if media.startswith(("image/", "audio/")) or media == BINARY or not (media or context.body[:1] == b"{"):
        if not context.body:
            raise InputError("expected a file, got an empty body")
        files = [bytes(context.body)]
        if (reader := image_texts.find_engine(context, None, TASKS)) is not None:
            return _texts(await image_texts.describe(context, reader, files, ["body"]))
        return await _of_files(context, _any_engine(context, None), files, ["body"])
    require_json(context.headers)
    request = context.json(PredictRequest)
    if (reader := image_texts.find_engine(context, request.model, TASKS)) is not None:
        check_parameters(image_texts.TASK, request)
        files, places, many = file_predictions.files_of(request.inputs, "inputs")
        found = await image_texts.describe(context, reader, files, places, request.parameters.text or "")
        return _texts([[one] for one in found] if many else found)
    return await _predictions(context, _any_engine(context, request.model), request)


def _texts(found: object) -> Response:
    """Return an answer that is no list of labels."""
    return Response(msgspec.json.encode(found), media=JSON)


def _any_engine(context: RequestContext, name: str | None) -> TensorEngine:
    return find_tensor_model(context, name, TASKS, "predict")


async def _of_files(
    context: RequestContext,
    engine: TensorEngine,
    files: list[bytes],
    where: list[str],
    parameters: PredictParameters | None = None,
) -> Predictions:
    """Return the prediction of one file."""
    if engine.media is None:
        raise InputError(
            f"{engine.info.name} is a model of texts", where="model", hint="Send JSON with inputs"
        )
    parameters = parameters or PredictParameters()
    check_parameters(engine.info.task, PredictRequest(inputs="", parameters=parameters))
    (found,) = await FilePredictions(context, engine, files, where).predict(parameters)
    return [*found]


async def _predictions(
    context: RequestContext, engine: TensorEngine, request: PredictRequest
) -> Predictions | Response:
    task, parameters = engine.info.task, request.parameters
    refuse_uncut(request.truncate)
    check_parameters(task, request)
    call = TaskCall(context, engine)
    if task in SPANS:
        return _texts(await _spans(call, request.inputs, parameters))
    if task == "multiple-choice":
        return await _choice(call, request)
    if isinstance(request.inputs, Question):
        raise InputError(f"{call.model.name} takes other inputs", where="inputs", hint="See /predict")
    if engine.media is not None:
        files, places, many = file_predictions.files_of(request.inputs, "inputs")
        if request.raw_scores:
            parameters = msgspec.structs.replace(parameters, function_to_apply="none")
        predictions = await FilePredictions(context, engine, files, places).predict(parameters)
        batch: list[Any] = [[*one] for one in predictions]
        return batch if many else [*predictions[0]]
    if parameters.candidate_labels is not None:
        return await _zero_shot(call, request)
    texts, many = _read(request.inputs)
    applied = "none" if request.raw_scores else parameters.function_to_apply
    found = await call.perform(
        text_model.classify(
            call.model, texts, "inputs", top=parameters.top_k, activation=ACTIVATIONS.get(applied or "")
        )
    )
    return _labels(found, many)


async def _spans(call: TaskCall, inputs: Any, parameters: PredictParameters) -> list[Any] | Answer:
    """Return the entities or filled masks of a text, or of each of a list of texts, or the answer to a question.

    Raises `InputError` for inputs of another task's form.
    """
    model = call.model
    if model.task == "question-answering":
        if not isinstance(inputs, Question) or inputs.context is None or inputs.choices is not None:
            raise InputError("expected an object with question and context", where="inputs")
        top, longest = parameters.top_k or 1, parameters.max_answer_len or text_answers.LONGEST_SPAN
        spans = await call.perform(
            text_answers.answer_question(
                model, inputs.question, inputs.context, "inputs", top=top, longest=longest
            )
        )
        return spans if top > 1 else spans[0]
    texts = [inputs] if isinstance(inputs, str) else inputs
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise InputError("expected a text, or a list of texts", where="inputs")
    if not 1 <= len(texts) <= MAX_SPAN_TEXTS:
        raise InputError(f"expected 1 to {MAX_SPAN_TEXTS} texts, got {len(texts)}", where="inputs")
    of_texts = _masks if model.task == "fill-mask" else _entities
    found = await of_texts(call, texts, parameters)
    return found[0] if isinstance(inputs, str) else found


async def _entities(call: TaskCall, texts: list[str], parameters: PredictParameters) -> list[Any]:
    strategy = parameters.aggregation_strategy or "simple"
    if strategy not in STRATEGIES:
        raise InputError(
            f"expected one of {', '.join(STRATEGIES)}, got {strategy!r}",
            where="parameters.aggregation_strategy",
        )
    ignored = text_answers.OUTSIDE if parameters.ignore_labels is None else parameters.ignore_labels
    aggregated = strategy == "simple"
    return await call.perform(
        text_answers.tag(call.model, texts, "inputs", aggregated=aggregated, ignored=ignored)
    )


async def _masks(call: TaskCall, texts: list[str], parameters: PredictParameters) -> list[Any]:
    """Return the best tokens of the mask of each text; of each of its masks where it has several."""
    targets = [parameters.targets] if isinstance(parameters.targets, str) else parameters.targets
    found = await call.perform(
        text_answers.fill_masks(
            call.model,
            texts,
            "inputs",
            top=parameters.top_k or answers.TOP,
            targets=targets,
            most_tokens=MAX_FILLED,
        )
    )
    return [text[0] if len(text) == 1 else text for text in found]


async def _choice(call: TaskCall, request: PredictRequest) -> Predictions:
    """Return the choices of a question with their scores, best first."""
    asked = request.inputs
    if not isinstance(asked, Question) or asked.context is not None or len(asked.choices or ()) < 2:
        raise InputError("expected an object with question and at least two choices", where="inputs")
    choices, where = list(asked.choices or ()), "inputs.choices"
    found = await call.perform(
        text_answers.choose(call.model, asked.question, choices, where, raw=request.raw_scores)
    )
    return _labels([found[: request.parameters.top_k]], many=False)


async def _zero_shot(call: TaskCall, request: PredictRequest) -> Predictions:
    """Return the candidate labels of a text with their scores, best first; of a list of texts, a list of them."""
    given = request.parameters
    if request.raw_scores or given.function_to_apply is not None:
        raise InputError(
            "scores of candidate_labels have one activation", where="parameters.function_to_apply"
        )
    texts: Any = [request.inputs] if isinstance(request.inputs, str) else request.inputs
    if not all(isinstance(text, str) for text in texts):
        raise InputError("expected a text or a list of texts with candidate_labels", where="inputs")
    found = await call.perform(
        zero_shot_text.classify(
            call.model,
            texts,
            given.candidate_labels,
            given.hypothesis_template,
            multi_label=bool(given.multi_label),
            where="inputs",
            given="parameters",
        )
    )
    return _labels([one[: given.top_k] for one in found], not isinstance(request.inputs, str))


def _labels(found: Sequence[Sequence[Answer]], many: bool) -> Predictions:
    """Return the labels of one input, or of each of many."""
    rows = [[LabelScore(one["score"], one["label"]) for one in row] for row in found]
    return [[*row] for row in rows] if many else [*rows[0]]


def _read(inputs: str | list[Any]) -> tuple[list[TextOrPair], bool]:
    """Return texts and pairs, and True for a batch: a text, [text, text], or [[text], [text, text], …]."""
    if isinstance(inputs, str):
        return [inputs], False
    if inputs and all(isinstance(one, str) for one in inputs):
        if len(inputs) > 2:
            raise InputError(
                f"expected a text or a pair of texts, got {len(inputs)}",
                where="inputs",
                hint="A batch is a list of lists: [[text], [text, text]]",
            )
        return [inputs[0] if len(inputs) == 1 else tuple(inputs)], False
    found: list[TextOrPair] = []
    for index, one in enumerate(inputs):
        if isinstance(one, str) or not 1 <= len(one) <= 2:
            raise InputError("expected [text] or [text, text]", where=f"inputs[{index}]")
        found.append(one[0] if len(one) == 1 else tuple(one))
    return found, True
