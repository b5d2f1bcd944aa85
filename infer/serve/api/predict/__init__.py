"""Predictions of tensor models: labels, entities, boxes and answers of texts, images and sound (TEI, vLLM)."""

from __future__ import annotations

from ...http.multipart import FORM
from ...http.routing import JSON, Route
from ...service import Service
from ..openai.openai_errors import ERROR_FORMAT
from . import predict
from .predict_types import ANSWERS, TEI_ERRORS, Classified, ClassifyRequest, Predictions, PredictRequest

ACCEPTS = (JSON, FORM, "image/*", "audio/*")


def routes(service: Service) -> list[Route]:
    return [
        Route(
            "POST",
            "/classify",
            ClassifyRequest,
            Classified | Predictions,
            predict.classify,
            "Labels of texts, images or sound",
            ERROR_FORMAT,
            (429, 501),
            work=True,
        ),
        Route(
            "POST",
            "/predict",
            PredictRequest,
            Predictions,
            predict.predict,
            "Labels of texts, pairs, images or sound; entities; answers to questions; texts about images",
            TEI_ERRORS,
            (429, 501),
            work=True,
            accepts=ACCEPTS,
            answers=ANSWERS,
        ),
    ]
