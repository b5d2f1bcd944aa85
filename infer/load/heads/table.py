"""Table of heads: the task, the outputs and the class of transformers for each ending of an architecture's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ... import families
from ...errors import InferError, SourceError
from ...spec import ZERO_SHOT_IMAGES
from ..model_patches.vlm_language_model import has_tower
from ..sentence_transformers.multi_vector import TASK as MULTI_VECTOR_TASK

if TYPE_CHECKING:
    from ..sentence_transformers.sentence_folder import SentenceFolder


@dataclass(frozen=True)
class Head:
    """One kind of model: architectures that end in `ending` and read the tensor `reads` do `task`."""

    ending: str
    task: str
    auto: str  # class of transformers that builds it where the architecture has no class of its own
    outputs: tuple[str, ...] = ("logits",)  # as transformers names them
    reads: str = "input_ids"

    @property
    def decodes_images(self) -> bool:
        """True for models that write text about an image, whose ending is the whole name of their class."""
        return self.reads == PIXELS and self.task == "text-generation"


PIXELS, SOUND, FEATURES, SERIES = "pixel_values", "input_values", "input_features", "past_values"
MASK_SEGMENTERS = (
    "Mask2FormerForUniversalSegmentation",
    "MaskFormerForInstanceSegmentation",
)  # masks with classes
BOXES = ("logits", "pred_boxes")
# Heads of a pre-training, left out: their model fills masks, or gives the vectors of its base model.
PRETRAINING = ("ForPreTraining", "ForMaskedImageModeling")
DISCRIMINATORS = ("Electra", "Funnel")  # tell replaced tokens from others
SPANS = ("start_logits", "end_logits")
HEADS = (
    Head("ForCausalLM", "text-generation", "AutoModelForCausalLM"),
    Head("LMHeadModel", "text-generation", "AutoModelForCausalLM"),
    Head("ForSequenceClassification", "classification", "AutoModelForSequenceClassification"),
    Head("ForTokenClassification", "token-classification", "AutoModelForTokenClassification"),
    Head("ForQuestionAnswering", "question-answering", "AutoModelForQuestionAnswering", SPANS),
    Head("ForMaskedLM", "fill-mask", "AutoModelForMaskedLM"),
    Head("ForMultipleChoice", "multiple-choice", "AutoModelForMultipleChoice"),
    Head("ForNextSentencePrediction", "classification", "AutoModelForNextSentencePrediction"),
    Head("ForImageClassification", "image-classification", "AutoModelForImageClassification", reads=PIXELS),
    Head(
        "ForImageClassificationWithTeacher",
        "image-classification",
        "AutoModelForImageClassification",
        reads=PIXELS,
    ),
    Head("ForSemanticSegmentation", "image-segmentation", "AutoModelForSemanticSegmentation", reads=PIXELS),
    Head("ForObjectDetection", "object-detection", "AutoModelForObjectDetection", BOXES, PIXELS),
    Head("ForSequenceClassification", "audio-classification", "AutoModelForAudioClassification", reads=SOUND),
    Head("ForAudioClassification", "audio-classification", "AutoModelForAudioClassification", reads=SOUND),
    # Towers of CLIP and its kin.
    Head("TextModelWithProjection", "embedding", "AutoModel", ("embedding",)),
    Head("VisionModelWithProjection", "image-embedding", "AutoModel", ("embedding",), PIXELS),
    Head("ForCTC", "automatic-speech-recognition", "AutoModelForCTC", reads=SOUND),
    # Models of a spectrogram, which their feature extractor computes.
    Head(
        "ForSequenceClassification", "audio-classification", "AutoModelForAudioClassification", reads=FEATURES
    ),
    Head("ForAudioClassification", "audio-classification", "AutoModelForAudioClassification", reads=FEATURES),
    Head("ForCTC", "automatic-speech-recognition", "AutoModelForCTC", reads=FEATURES),
    Head(
        "ForDepthEstimation", "depth-estimation", "AutoModelForDepthEstimation", ("predicted_depth",), PIXELS
    ),
    Head("ForVideoClassification", "video-classification", "AutoModelForVideoClassification", reads=PIXELS),
    # Masks with classes, of which the class of each pixel is made.
    *(
        Head(ending, "image-segmentation", "AutoModelForUniversalSegmentation", reads=PIXELS)
        for ending in MASK_SEGMENTERS
    ),
    Head(
        "ForImageSuperResolution", "image-to-image", "AutoModelForImageToImage", ("reconstruction",), PIXELS
    ),
    Head("ForXVector", "audio-embedding", "AutoModelForAudioXVector", ("embedding",), SOUND),
    Head("ForXVector", "audio-embedding", "AutoModelForAudioXVector", ("embedding",), FEATURES),
    Head("AudioModelWithProjection", "audio-embedding", "AutoModel", ("embedding",), FEATURES),
    Head(
        "ForAudioFrameClassification",
        "audio-frame-classification",
        "AutoModelForAudioFrameClassification",
        reads=SOUND,
    ),
    Head("ForPrediction", "time-series-forecasting", "AutoModel", ("prediction_outputs",), SERIES),
    Head(
        "ForTimeSeriesClassification",
        "time-series-classification",
        "AutoModel",
        ("prediction_outputs",),
        SERIES,
    ),
    Head("ForClassification", "time-series-classification", "AutoModel", ("prediction_logits",), SERIES),
    Head("ForRegression", "time-series-regression", "AutoModel", ("regression_outputs",), SERIES),
    # Dense passage retrieval: the pooled output is the embedding.
    Head("DPRQuestionEncoder", "embedding", "AutoModel", ("embedding",)),
    Head("DPRContextEncoder", "embedding", "AutoModel", ("embedding",)),
)
_SEQ2SEQ = "AutoModelForSeq2SeqLM"
# Heads of encoder-decoders that run once and generate nothing.
RUN_ONCE = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForAudioClassification",
    "EncoderModel",  # the encoder alone, as text encoders of image generators and sentence embedders have it
)
ENCODER_DECODERS = (
    Head("ForConditionalGeneration", "text-generation", _SEQ2SEQ),
    Head("MTModel", "text-generation", _SEQ2SEQ),
    Head("T5WithLMHeadModel", "text-generation", _SEQ2SEQ),  # as early checkpoints of T5 name it
)
SPEECH = Head(
    "WhisperForConditionalGeneration", "text-generation", "AutoModelForSpeechSeq2Seq", reads=FEATURES
)
SPARSE_EMBEDDING = Head("ForMaskedLM", "embedding", "AutoModelForMaskedLM", ("embedding",))
EMBEDDINGS = (
    Head("Model", "embedding", "AutoModel", ("embedding",)),
    Head("Model", "image-embedding", "AutoModel", ("embedding",), PIXELS),
    Head("Model", "audio-embedding", "AutoModel", ("embedding",), SOUND),
    Head("Model", "audio-embedding", "AutoModel", ("embedding",), FEATURES),
)
# Late interaction: a vector for each token.
MULTI_VECTOR = Head("Model", MULTI_VECTOR_TASK, "AutoModel", ("token_embeddings",))
# CLIP and its kin as a whole: every image is compared with every text.
DUAL_TOWERS = Head("Model", ZERO_SHOT_IMAGES, "AutoModel", ("logits", "image_embeds", "text_embeds"), PIXELS)
# SigLIP's text tower: its pooled output is what images are compared with.
PADDED_TEXT = Head("SiglipTextModel", "embedding", "AutoModel", ("embedding",))


def architecture(config: Mapping[str, Any]) -> str:
    """Return the first of `architectures` of config.json, or a description of a config without."""
    found = config.get("architectures")
    if isinstance(found, list) and found and isinstance(found[0], str):
        return found[0]
    return f"{config.get('model_type', 'no')} model without architectures"


def candidates(config: Mapping[str, Any], folder: Path, sentence: SentenceFolder) -> tuple[Head, ...]:
    """Return the heads for `architectures` of config.json, none where no task fits; raises `SourceError`.

    Raises the error of a family that refuses it, such as `NotUsableError` for a head that torch.export gets wrong.
    """
    name = architecture(config)
    # A sentence-transformers folder often names the class of the pre-training, such as MPNetForMaskedLM.
    if sentence.task == MULTI_VECTOR.task:
        return (MULTI_VECTOR,)
    if sentence.task == "embedding":
        return (SPARSE_EMBEDDING if sentence.sparse else EMBEDDINGS[0],)
    if name in families.known().image_decoders:
        return (Head(name, "text-generation", "AutoModelForImageTextToText", reads=PIXELS),)
    if refusal := _refusal(name, folder):
        raise refusal
    # DETR's decoder reads queries of its own, BART's of a classifier the source: nothing is generated.
    runs_once = name.endswith(("ForObjectDetection", *RUN_ONCE))
    if config.get("is_encoder_decoder") and not runs_once:
        return _encoder_decoder(name, str(config.get("model_type")), folder)
    if has_tower(config, name):
        return tuple(head for head in HEADS if head.task == "text-generation")[:1]
    found = tuple(head for head in HEADS if name.endswith(head.ending))
    if sentence.task == "classification":
        return tuple(head for head in HEADS if head.task == "classification")
    if found:
        return found
    if name == PADDED_TEXT.ending:
        return (PADDED_TEXT,)
    if name.endswith("Model"):
        return EMBEDDINGS
    if name.endswith(PRETRAINING) and not name.startswith(DISCRIMINATORS):
        return (*(head for head in HEADS if head.task == "fill-mask"), *EMBEDDINGS)
    return ()


def _refusal(name: str, folder: Path) -> InferError | None:
    """Return the refusal of a family of an architecture, None where no family refuses it."""
    for pattern, refusal in families.known().refused.items():
        if re.fullmatch(pattern, name):
            hint = refusal.hint.format(name=name)
            return refusal.error(f"{name} {refusal.why}", where=str(folder / "config.json"), hint=hint)
    return None


def no_task(name: str, folder: Path) -> SourceError:
    """Return the error of an architecture whose head is in no table."""
    if "ColBERT" in name or name.endswith("ForRetrieval"):
        return SourceError(
            f"infer has no task for {name}, which gives a vector for each token of a text or part of an image "
            "(late interaction); it opens those of texts that sentence-transformers, PyLate or Stanford saved",
            where=str(folder / "config.json"),
            hint="Give its state dict and --model file.py:factory that returns the vectors of all tokens, and compare "
            "them (MaxSim) in your code",
        )
    return SourceError(
        f"infer has no task for the head of {name}",
        where=str(folder / "config.json"),
        hint="Check `architectures`, or give its state dict and --model file.py:factory",
    )


def _generating() -> set[str]:
    """Return the model types of encoder-decoders whose base model becomes a generating one by tied embeddings."""
    from transformers.models.auto import modeling_auto

    return {
        *modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        *modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    }


def _encoder_decoder(name: str, model_type: str, folder: Path) -> tuple[Head, ...]:
    """Return the head of an encoder-decoder that generates; raise `SourceError` for one with another head."""
    if name == SPEECH.ending:
        return (SPEECH,)
    if name.endswith("Model") and not name.endswith("EncoderDecoderModel") and model_type in _generating():
        return (ENCODER_DECODERS[0], SPEECH)  # the base model, whose output layer is its embedding
    found = tuple(head for head in ENCODER_DECODERS if name.endswith(head.ending))
    if not found:
        known = ", ".join([head.ending for head in ENCODER_DECODERS[:2]] + list(RUN_ONCE))
        raise SourceError(
            f"{name} is an encoder-decoder model; infer opens those whose architecture ends in {known}",
            where=str(folder / "config.json"),
            hint="Give the state dict of the half you need and --model file.py:factory",
        )
    return found
