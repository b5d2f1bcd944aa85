"""Predictions of models of images and sound for /predict and /classify: labels, boxes, masks and vectors."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ....errors import InputError
from ....spec import ZERO_SHOT_IMAGES
from ....tasks import answers
from ....tasks.media_model import MediaModel
from ....tasks.score_activation import activation_of, scores_of
from ... import media_files
from ...batching import text_inputs
from ...batching.tensor_engine import TensorEngine
from ...http import json_parse
from ...http.multipart import MultipartForm
from ...http.request_context import RequestContext
from ...task_call import TaskCall
from .predict_types import Box, LabelScore, PredictParameters

MOST_FILES = 64  # of one request
MAX_MASK_PIXELS = 1 << 24  # of an image whose classes are given for each pixel
ACTIVATIONS = {"softmax": "softmax", "sigmoid": "sigmoid", "none": "identity"}
TASKS = (
    "image-classification",
    "audio-classification",
    "object-detection",
    "image-segmentation",
    "depth-estimation",
    "image-embedding",
    "audio-embedding",
    ZERO_SHOT_IMAGES,
)
Prediction = list[LabelScore] | list[float]


def parameters_of(form: MultipartForm) -> PredictParameters:
    """Return the parameters that a form gives as fields, `candidate_labels` as one field for each label."""
    names = ("top_k", "threshold", "function_to_apply", "hypothesis_template")
    fields: dict[str, Any] = {name: value for name in names if (value := form.text(name)) is not None}
    if labels := [label for label in form.fields.get("candidate_labels", ()) if label]:
        fields["candidate_labels"] = labels
    return json_parse.convert(fields, PredictParameters, strict=False, where="")


class FilePredictions:
    """Predictions of files by a model of images or sound; `where`: place of each in the request.

    Raises `InputError` for no file, and for too many, `NotUsableError` for a model without preprocessing.
    """

    def __init__(
        self, context: RequestContext, engine: TensorEngine, files: Sequence[bytes], where: Sequence[str]
    ) -> None:
        if not 1 <= len(files) <= MOST_FILES:
            raise InputError(
                f"expected 1 to {MOST_FILES} files, got {len(files)}", where=where[0] if where else "inputs"
            )
        self.context, self.files, self.where = context, files, where
        self.model, self.call = media_files.media_model(engine), TaskCall(context, engine)

    async def predict(self, parameters: PredictParameters) -> list[Prediction]:
        """Return the prediction of each file, labels best first."""
        model = self.model
        if model.task == ZERO_SHOT_IMAGES:
            return await self._compare(parameters)
        outputs, sizes = await self._run()
        for place, (height, width) in zip(self.where, sizes, strict=True):
            if model.task in ("image-segmentation", "depth-estimation") and height * width > MAX_MASK_PIXELS:
                raise InputError(
                    f"expected an image of at most {MAX_MASK_PIXELS} pixels, got {width} x {height}",
                    where=place,
                    hint="Send it smaller; masks and depth maps have the size of the image",
                )
        given = model, outputs, sizes, parameters
        return await media_files.run_slow(self.context, self.context.timeout(), _predictions, *given)

    async def scores(self, *, raw: bool) -> np.ndarray:
        """Return scores or logits of a classifier, float32 [files, labels]."""
        outputs, _ = await self._run()
        logits = np.stack([output["logits"] for output in outputs]).astype(np.float32, copy=False)
        return logits if raw else scores_of(logits, activation_of(self.model.meta, logits.shape[1]))

    async def _compare(self, parameters: PredictParameters) -> list[Prediction]:
        """Return the candidate labels with their scores for each image."""
        labels, engine = parameters.candidate_labels, self.call.engine
        texts = answers.candidate_texts(labels, parameters.hypothesis_template, "parameters")
        self.call.check_admission()
        encoded = await engine.tokenizer.encode_typed(texts, "parameters.candidate_labels")
        rows = text_inputs.padded_rows(engine, *encoded)
        tensors, _ = await media_files.open_files(self.context, self.model, self.files, self.where)
        found: list[Prediction] = []
        for image in tensors:
            (outputs,) = await self.call.run_tensors([{**image, **rows}])
            scores = self.model.candidate_scores(outputs["logits"], labels or ())
            found.append([LabelScore(one["score"], one["label"]) for one in scores[: parameters.top_k]])
        return found

    async def _run(self) -> tuple[list[dict[str, np.ndarray]], list[tuple[int, int]]]:
        """Decode and run the files: the outputs of each, and the height and width of each image."""
        self.call.check_admission()
        tensors, sizes = await media_files.open_files(self.context, self.model, self.files, self.where)
        return await self.call.run_tensors(tensors), sizes


def _predictions(
    model: MediaModel,
    outputs: Sequence[Mapping[str, np.ndarray]],
    sizes: Sequence[tuple[int, int]],
    parameters: PredictParameters,
) -> list[Prediction]:
    return [_prediction(model, output, size, parameters) for output, size in zip(outputs, sizes, strict=True)]


def _prediction(
    model: MediaModel, outputs: Mapping[str, np.ndarray], size: tuple[int, int], parameters: PredictParameters
) -> Prediction:
    if model.task in ("image-embedding", "audio-embedding"):
        return [float(value) for value in outputs["embedding"]]
    if model.task == "object-detection":
        threshold = answers.THRESHOLD if parameters.threshold is None else parameters.threshold
        found = answers.boxes(outputs["logits"], outputs["pred_boxes"], size, model.labels, threshold)
        return [
            LabelScore(one["score"], one["label"], box=Box(**one["box"])) for one in found[: parameters.top_k]
        ]
    if model.task == "image-segmentation":
        return _masks(answers.class_map(outputs["logits"], size), model)
    if model.task == "depth-estimation":
        return [_depth(answers.depth_map(outputs["predicted_depth"], size))]
    logits = outputs["logits"]
    named = ACTIVATIONS.get(parameters.function_to_apply or "", "") or activation_of(model.meta, len(logits))
    top = answers.label_scores(logits, model.labels, named, parameters.top_k)
    return [LabelScore(one["score"], one["label"]) for one in top]


def _masks(classes: np.ndarray, model: MediaModel) -> list[LabelScore]:
    """Return a PNG mask of each class of an image, 255 on its pixels, the largest class first."""
    counts, found = np.bincount(classes.reshape(-1)), list[LabelScore]()
    for kind in (int(i) for i in np.argsort(-counts, kind="stable") if counts[i]):
        mask = _png((classes == kind).astype(np.uint8) * 255)
        found.append(LabelScore(None, answers.name_of(model.labels, kind), mask=mask))
    return found


def _depth(depth: np.ndarray) -> LabelScore:
    """Return a depth map as a PNG, 0 at the smallest value and 255 at the largest."""
    low, high = float(depth.min()), float(depth.max())
    pixels = (depth - low) / max(high - low, 1e-30) * 255
    return LabelScore(None, "depth", mask=_png(pixels.astype(np.uint8)))


def _png(pixels: np.ndarray) -> str:
    """Return uint8 [height, width] as a PNG in base64."""
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


def files_of(inputs: Any, where: str) -> tuple[list[bytes], list[str], bool]:
    """Decode base64 `inputs`: one, or a list of them; the files, their places, and True for a list."""
    if isinstance(inputs, str):
        return [media_files.from_base64(inputs, where)], [where], False
    places = [f"{where}[{index}]" for index in range(len(inputs))]
    files = []
    for one, place in zip(inputs, places, strict=True):
        one = one[0] if isinstance(one, list) and len(one) == 1 else one
        if not isinstance(one, str):
            raise InputError("expected a file as base64", where=place)
        files.append(media_files.from_base64(one, place))
    return files, places, True
