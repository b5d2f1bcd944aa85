"""Predictions of texts, pairs, images and sound: /classify as vLLM has it, and /predict of TEI.

Images and sound come as base64, as a form, or as the body itself, which Hugging Face's InferenceClient sends.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec
import numpy as np

from ....errors import InputError
from ....llm.text.tokenizer import TextOrPair
from ....tasks import text_answers
from ....tasks.score_activation import activation_of, scores_of
from ...batching.tensor_engine import TensorEngine
from ...http.multipart import FORM, media_of
from ...http.request_context import RequestContext
from ...http.routing import BINARY, JSON, NonfiniteError, Response
from ..media import image_texts, media_predictions, media_request
from ..openai.openai_errors import require_json
from . import text_request, text_spans, zero_shot
from .text_types import (
    Classification,
    Classified,
    ClassifyRequest,
    LabelScore,
    Predictions,
    PredictParameters,
    PredictRequest,
    Question,
    TextUsage,
)

TASKS = ("classification", "multiple-choice", *media_predictions.TASKS, *text_spans.TASKS)
CLASSIFIERS = ("classification", "image-classification", "audio-classification")


async def classify(context: RequestContext) -> Classified | Predictions:
    require_json(context)
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
        return await _predictions(context, asked)
    texts: list[TextOrPair] = [request.input] if isinstance(request.input, str) else list(request.input or [])
    engine = text_request.find_text_model(context, request.model, CLASSIFIERS, "classify")
    raw, used = not request.use_activation, 0
    if engine.media is not None:
        files, places, _ = media_predictions.files_of(texts, "input")
        values = await media_predictions.file_scores(context, engine, files, places, raw=raw)
    else:
        values, used = await _values(context, engine, texts, "input", applied="none" if raw else None)
    labels = _labels(engine)
    data = [
        Classification(index, labels[int(row.argmax())], row.tolist(), len(labels))
        for index, row in enumerate(values)
    ]
    usage = TextUsage(used, used)
    return Classified(text_request.new_id("classify"), int(time.time()), engine.predictor.name, data, usage)


async def predict(context: RequestContext) -> Predictions | Response:
    media = media_of(context.headers)
    if media == FORM:
        form = await media_request.read_form(context)
        if (reader := image_texts.find_engine(context, form.text("model"), TASKS)) is not None:
            text = form.text("text") or ""
            return _texts(await image_texts.describe(context, reader, [form.file("file")], ["file"], text))
        engine = _any_engine(context, form.text("model"))
        parameters = media_predictions.parameters_of(form)
        return await _of_files(context, engine, [form.file("file")], ["file"], parameters)
    if media.startswith(("image/", "audio/")) or media == BINARY or not (media or context.body[:1] == b"{"):
        if not context.body:
            raise InputError("expected a file, got an empty body")
        files = [bytes(context.body)]
        if (reader := image_texts.find_engine(context, None, TASKS)) is not None:
            return _texts(await image_texts.describe(context, reader, files, ["body"]))
        return await _of_files(context, _any_engine(context, None), files, ["body"])
    require_json(context)
    request = context.json(PredictRequest)
    if (reader := image_texts.find_engine(context, request.model, TASKS)) is not None:
        text_request.check_parameters(image_texts.TASK, request)
        files, places, many = media_predictions.files_of(request.inputs, "inputs")
        found = await image_texts.describe(context, reader, files, places, request.parameters.text or "")
        return _texts([[one] for one in found] if many else found)
    engine = _any_engine(context, request.model)
    if engine.predictor.task in text_spans.TASKS:
        text_request.refuse_uncut(request.truncate)
        text_request.check_parameters(engine.predictor.task, request)
        return _texts(await text_spans.predict_spans(context, engine, request.inputs, request.parameters))
    return await _predictions(context, request)


def _texts(found: Any) -> Response:
    """Return an answer that is no list of labels."""
    return Response(msgspec.json.encode(found), media=JSON)


def _any_engine(context: RequestContext, name: str | None) -> TensorEngine:
    return text_request.find_text_model(context, name, TASKS, "predict")


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
            f"{engine.predictor.name} is a model of texts", where="model", hint="Send JSON with inputs"
        )
    parameters = parameters or PredictParameters()
    text_request.check_parameters(engine.predictor.task, PredictRequest(inputs="", parameters=parameters))
    (found,) = await media_predictions.predict_files(context, engine, files, where, parameters)
    return [*found]


async def _predictions(context: RequestContext, request: PredictRequest) -> Predictions:
    text_request.refuse_uncut(request.truncate)
    engine = _any_engine(context, request.model)
    text_request.check_parameters(engine.predictor.task, request)
    if engine.predictor.task == "multiple-choice":
        return await _choice(context, engine, request)
    if isinstance(request.inputs, Question) or engine.predictor.task in text_spans.TASKS:
        raise InputError(f"{engine.predictor.name} takes other inputs", where="inputs", hint="See /predict")
    if engine.media is not None:
        files, places, many = media_predictions.files_of(request.inputs, "inputs")
        parameters = request.parameters
        if request.raw_scores:
            parameters = msgspec.structs.replace(parameters, function_to_apply="none")
        predictions = await media_predictions.predict_files(context, engine, files, places, parameters)
        batch: list[Any] = [[*one] for one in predictions]
        return batch if many else [*predictions[0]]
    if request.parameters.candidate_labels is not None:
        return await zero_shot.classify(context, engine, request, _labels(engine))
    texts, many = _read(request.inputs)
    applied = "none" if request.raw_scores else request.parameters.function_to_apply
    values, _ = await _values(context, engine, texts, "inputs", applied=applied)
    labels, top = _labels(engine), request.parameters.top_k
    found: list[Any] = [
        [LabelScore(float(row[i]), labels[i]) for i in np.argsort(-row, kind="stable").tolist()[:top]]
        for row in values
    ]
    return [*found] if many else [*found[0]]


async def _choice(context: RequestContext, engine: TensorEngine, request: PredictRequest) -> Predictions:
    """Return the choices of a question with their scores, best first."""
    asked = request.inputs
    if not isinstance(asked, Question) or asked.context is not None or len(asked.choices or ()) < 2:
        raise InputError("expected an object with question and at least two choices", where="inputs")
    choices = list(asked.choices or ())
    pairs: list[TextOrPair] = [(asked.question, choice) for choice in choices]
    scores, _ = await text_request.run_texts(context, engine, pairs, where="inputs.choices")
    named = text_answers.choice_scores(scores, choices, raw=request.raw_scores)
    return [LabelScore(one["score"], one["label"]) for one in named[: request.parameters.top_k]]


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


async def _values(
    context: RequestContext,
    engine: TensorEngine,
    texts: list[TextOrPair],
    where: str,
    *,
    applied: str | None = None,
) -> tuple[np.ndarray, int]:
    """Return scores [len(texts), labels] by the activation asked for, else the model's, and the number of tokens."""
    logits, used = await text_request.run_texts(context, engine, texts, where=where)
    if wrong := int((~np.isfinite(logits)).sum()):
        raise NonfiniteError(engine.predictor.outputs[0].name, wrong)
    meta = engine.predictor.manifest.meta or {}
    named = media_predictions.ACTIVATIONS.get(applied or "") or activation_of(meta, logits.shape[1])
    return scores_of(logits, named), used


def _labels(engine: TensorEngine) -> list[str]:
    count = text_request.labels_of(engine)
    named = (engine.predictor.manifest.meta or {}).get("labels") or []
    return named if len(named) == count else [f"LABEL_{index}" for index in range(count)]
