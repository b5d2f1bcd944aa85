"""Table of the classes `InferModelFor…`: the Auto class of transformers, the output, and the task of the artifact."""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers
from transformers import modeling_outputs as outputs
from transformers.utils import ModelOutput

from .generating_model import GeneratingModel, SourceModel, SpeechModel
from .model import InferModel


class Kind(NamedTuple):
    """One class: artifacts of `task`, called as the models of transformers' class `auto` are."""

    auto: str
    output: type[ModelOutput]
    task: str
    asked: dict[str, Any] = {}
    base: type[InferModel] = InferModel


WRITES, GENERATE = "text-generation", {"task": "generate"}
KINDS = {
    "SequenceClassification": Kind(
        "AutoModelForSequenceClassification", outputs.SequenceClassifierOutput, "classification"
    ),
    "TokenClassification": Kind(
        "AutoModelForTokenClassification", outputs.TokenClassifierOutput, "token-classification"
    ),
    "QuestionAnswering": Kind(
        "AutoModelForQuestionAnswering", outputs.QuestionAnsweringModelOutput, "question-answering"
    ),
    "MaskedLM": Kind("AutoModelForMaskedLM", outputs.MaskedLMOutput, "fill-mask"),
    "FeatureExtraction": Kind(
        "AutoModel", outputs.BaseModelOutputWithPooling, "tensors", {"task": "features"}
    ),
    "ImageClassification": Kind(
        "AutoModelForImageClassification", outputs.ImageClassifierOutput, "image-classification"
    ),
    "SemanticSegmentation": Kind(
        "AutoModelForSemanticSegmentation", outputs.SemanticSegmenterOutput, "image-segmentation"
    ),
    "DepthEstimation": Kind("AutoModelForDepthEstimation", outputs.DepthEstimatorOutput, "depth-estimation"),
    "AudioClassification": Kind(
        "AutoModelForAudioClassification", outputs.SequenceClassifierOutput, "audio-classification"
    ),
    "AudioFrameClassification": Kind(
        "AutoModelForAudioFrameClassification", outputs.TokenClassifierOutput, "audio-frame-classification"
    ),
    "CTC": Kind("AutoModelForCTC", outputs.CausalLMOutput, "automatic-speech-recognition"),
    "CausalLM": Kind("AutoModelForCausalLM", outputs.CausalLMOutput, WRITES, GENERATE, GeneratingModel),
    "Seq2SeqLM": Kind("AutoModelForSeq2SeqLM", outputs.Seq2SeqLMOutput, WRITES, GENERATE, SourceModel),
    "SpeechSeq2Seq": Kind(
        "AutoModelForSpeechSeq2Seq", outputs.Seq2SeqLMOutput, WRITES, GENERATE, SpeechModel
    ),
}


def _made(ending: str, kind: Kind) -> type[InferModel]:
    auto = getattr(transformers, kind.auto)
    fields = {
        "__doc__": f"An artifact of the task {kind.task}, called as models of transformers' `{kind.auto}` are.",
        "auto_model_class": auto,
        "output_class": kind.output,
        "task": kind.task,
        "asked": kind.asked,
    }
    return type(f"InferModelFor{ending}", (kind.base,), fields)


CLASSES = {f"InferModelFor{ending}": _made(ending, kind) for ending, kind in KINDS.items()}


def __getattr__(name: str) -> Any:
    if name in CLASSES:
        return CLASSES[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
