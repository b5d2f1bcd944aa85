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
    outputs: tuple[str, ...] = ("logits",)  # as transformers names them
    reads: str = "input_ids"
    auto: str = (
        ""  # class of transformers that builds it where the architecture has none, if not AutoModel + ending
    )

    @property
    def auto_class(self) -> str:
        return self.auto or f"AutoModel{self.ending}"

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
AUDIO = "AutoModelForAudioClassification"
HEADS = (
    Head("ForCausalLM", "text-generation"),
    Head("LMHeadModel", "text-generation", auto="AutoModelForCausalLM"),
    Head("ForSequenceClassification", "classification"),
    Head("ForTokenClassification", "token-classification"),
    Head("ForQuestionAnswering", "question-answering", SPANS),
    Head("ForMaskedLM", "fill-mask"),
    Head("ForMultipleChoice", "multiple-choice"),
    Head("ForNextSentencePrediction", "classification"),
    Head("ForImageClassification", "image-classification", reads=PIXELS),
    Head(
        "ForImageClassificationWithTeacher",
        "image-classification",
        reads=PIXELS,
        auto="AutoModelForImageClassification",
    ),
    Head("ForSemanticSegmentation", "image-segmentation", reads=PIXELS),
    Head("ForObjectDetection", "object-detection", BOXES, PIXELS),
    Head("ForSequenceClassification", "audio-classification", reads=SOUND, auto=AUDIO),
    Head("ForAudioClassification", "audio-classification", reads=SOUND),
    # Towers of CLIP and its kin.
    Head("TextModelWithProjection", "embedding", ("embedding",), auto="AutoModel"),
    Head("VisionModelWithProjection", "image-embedding", ("embedding",), PIXELS, "AutoModel"),
    Head("ForCTC", "automatic-speech-recognition", reads=SOUND),
    # Models of a spectrogram, which their feature extractor computes.
    Head("ForSequenceClassification", "audio-classification", reads=FEATURES, auto=AUDIO),
    Head("ForAudioClassification", "audio-classification", reads=FEATURES),
    Head("ForCTC", "automatic-speech-recognition", reads=FEATURES),
    Head("ForDepthEstimation", "depth-estimation", ("predicted_depth",), PIXELS),
    Head("ForVideoClassification", "video-classification", reads=PIXELS),
    # Masks with classes, of which the class of each pixel is made.
    *(
        Head(ending, "image-segmentation", reads=PIXELS, auto="AutoModelForUniversalSegmentation")
        for ending in MASK_SEGMENTERS
    ),
    Head(
        "ForImageSuperResolution", "image-to-image", ("reconstruction",), PIXELS, "AutoModelForImageToImage"
    ),
    Head("ForXVector", "audio-embedding", ("embedding",), SOUND, "AutoModelForAudioXVector"),
    Head("ForXVector", "audio-embedding", ("embedding",), FEATURES, "AutoModelForAudioXVector"),
    Head("AudioModelWithProjection", "audio-embedding", ("embedding",), FEATURES, "AutoModel"),
    Head("ForAudioFrameClassification", "audio-frame-classification", reads=SOUND),
    Head("ForPrediction", "time-series-forecasting", ("prediction_outputs",), SERIES, "AutoModel"),
    Head(
        "ForTimeSeriesClassification",
        "time-series-classification",
        ("prediction_outputs",),
        SERIES,
        "AutoModel",
    ),
    Head("ForClassification", "time-series-classification", ("prediction_logits",), SERIES, "AutoModel"),
    Head("ForRegression", "time-series-regression", ("regression_outputs",), SERIES, "AutoModel"),
    # Dense passage retrieval: the pooled output is the embedding.
    Head("DPRQuestionEncoder", "embedding", ("embedding",), auto="AutoModel"),
    Head("DPRContextEncoder", "embedding", ("embedding",), auto="AutoModel"),
)
SEQ2SEQ = "AutoModelForSeq2SeqLM"
# Heads of encoder-decoders that run once and generate nothing.
RUN_ONCE = (
    "ForSequenceClassification",
    "ForTokenClassification",
    "ForQuestionAnswering",
    "ForAudioClassification",
    "EncoderModel",  # the encoder alone, as text encoders of image generators and sentence embedders have it
)
ENCODER_DECODERS = (
    Head("ForConditionalGeneration", "text-generation", auto=SEQ2SEQ),
    Head("MTModel", "text-generation", auto=SEQ2SEQ),
    Head("T5WithLMHeadModel", "text-generation", auto=SEQ2SEQ),  # as early checkpoints of T5 name it
)
SPEECH = Head(
    "WhisperForConditionalGeneration", "text-generation", reads=FEATURES, auto="AutoModelForSpeechSeq2Seq"
)
SPARSE_EMBEDDING = Head("ForMaskedLM", "embedding", ("embedding",))
EMBEDDINGS = (
    Head("Model", "embedding", ("embedding",), auto="AutoModel"),
    Head("Model", "image-embedding", ("embedding",), PIXELS, "AutoModel"),
    Head("Model", "audio-embedding", ("embedding",), SOUND, "AutoModel"),
    Head("Model", "audio-embedding", ("embedding",), FEATURES, "AutoModel"),
)
# Late interaction: a vector for each token.
MULTI_VECTOR = Head("Model", MULTI_VECTOR_TASK, ("token_embeddings",), auto="AutoModel")
# CLIP and its kin as a whole: every image is compared with every text.
DUAL_TOWERS = Head("Model", ZERO_SHOT_IMAGES, ("logits", "image_embeds", "text_embeds"), PIXELS, "AutoModel")
# SigLIP's text tower: its pooled output is what images are compared with.
PADDED_TEXT = Head("SiglipTextModel", "embedding", ("embedding",), auto="AutoModel")


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
        return (Head(name, "text-generation", reads=PIXELS, auto="AutoModelForImageTextToText"),)
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
