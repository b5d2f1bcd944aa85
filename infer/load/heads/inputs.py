"""Wrapper of a model for its head, and the specs and sizes of the inputs that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn

from ...plan import Plan
from ...preprocess.image import ImagePreprocessor
from ...preprocess.transformers_processor import TransformersProcessor
from ...spec import TensorSpec
from ..hf_preprocessor import Preprocessor
from ..sentence_transformers.sentence_folder import SentenceFolder
from .dual_towers import tower_pair
from .image_decoders import vision_config
from .sound_wrappers import SoundVectors, features_shape, frame_width, sound_size
from .table import (
    DUAL_TOWERS,
    FEATURES,
    MASK_SEGMENTERS,
    MULTI_VECTOR,
    PADDED_TEXT,
    PIXELS,
    SERIES,
    SOUND,
    Head,
)
from .text import Decoder, Encoder, EncoderDecoder, has_token_types, position_limit
from .wrappers import (
    DualTowers,
    Headed,
    ImageEncoder,
    MaskSegmenter,
    OneChoice,
    PaddedTextEncoder,
    SourceClassifier,
    SourceHead,
    UnmaskedImageEncoder,
)

TEXT = ("input_ids", "attention_mask")
SECONDS = (0.1, 30)  # of sound in one input
RATE = 16000
SMALLEST_FRAMES, LARGEST_FRAMES = 16, 3000  # of a spectrogram, up to 100 a second
MOST_TEXTS = 1024  # that an image is compared with
MASK_SIZE = (384, 384)  # of the masks of which transformers makes Mask2Former's classes of pixels
SMALLEST_IMAGE, LARGEST_IMAGE = 64, 1333


def wrap(
    model: nn.Module, head: Head, sentence: SentenceFolder, preprocessor: Preprocessor | None
) -> nn.Module:
    """Return the model with named tensors as inputs and outputs, in eval mode."""
    if head == DUAL_TOWERS:
        return DualTowers(model, pads=tower_pair(model.config).pads).eval()
    if head.reads == PIXELS and head.task != "text-generation":
        return _images(model, head, preprocessor).eval()
    if head.reads == SERIES:
        return Headed(model, (SERIES,), head.outputs).eval()
    if head.reads in (SOUND, FEATURES) and head.task != "text-generation":
        return _sound(model, head).eval()
    if head.task == "text-generation":
        if head.reads == "input_ids" and not getattr(model.config, "is_encoder_decoder", False):
            return Decoder(model).eval()
        with_text = head.reads == PIXELS and getattr(model, "encode_source", None) is not None
        return EncoderDecoder(model, (head.reads, *(["input_ids"] if with_text else []))).eval()
    return _texts(model, head, sentence).eval()


def _texts(model: nn.Module, head: Head, sentence: SentenceFolder) -> nn.Module:
    pairs = (*TEXT, *(["token_type_ids"] if has_token_types(model) else []))
    if head == PADDED_TEXT:
        return PaddedTextEncoder(model)
    if head.ending == "TextModelWithProjection":
        return Headed(model, TEXT, ("text_embeds",))
    if head.ending.startswith("DPR"):
        return Headed(model, pairs, ("pooler_output",))
    if _takes(model, "decoder_input_ids"):
        kind = SourceClassifier if head.task == "classification" else SourceHead
        return kind(model, TEXT, head.outputs)
    if head.task == "multiple-choice":
        return OneChoice(model, pairs, head.outputs)
    if _takes(model, "bbox"):
        of_page = (*TEXT, "bbox", *([PIXELS] if _takes(model, PIXELS) else []))
        return Headed(model, of_page, head.outputs)
    if head.task not in ("embedding", MULTI_VECTOR.task):
        return Headed(model, pairs, head.outputs)
    # The pooler's output is not the embedding, and many checkpoints lack its weights.
    if getattr(model, "pooler", None) is not None:
        setattr(model, "pooler", nn.Identity())  # noqa: B010 - some models call it without a look
    if head == MULTI_VECTOR:
        return Encoder(model, sentence.token_head(model.config))
    return Encoder(model, sentence.head(), sparse=sentence.sparse)


def _images(model: nn.Module, head: Head, preprocessor: Preprocessor | None) -> nn.Module:
    if head.task == "image-embedding":
        return (UnmaskedImageEncoder if _takes(model, "noise") else ImageEncoder)(model)
    if head.ending in MASK_SEGMENTERS:
        is_rescaled = head.ending.startswith("Mask2Former")
        return MaskSegmenter(model, MASK_SIZE if is_rescaled else None)
    masked = _gives_mask(preprocessor) and _takes(model, "pixel_mask")
    return Headed(model, (PIXELS, *(["pixel_mask"] if masked else [])), head.outputs)


def _sound(model: nn.Module, head: Head) -> nn.Module:
    """Return an audio model, with a padding mask where the model takes one."""
    masked = _takes(model, "attention_mask") and head.ending != "ForXVector"  # which reads lengths out of it
    if head.reads == SOUND:
        masked = masked and getattr(model.config, "feat_extract_norm", "") == "layer"
    names = (head.reads, *(["attention_mask"] if masked else []))
    if head.task == "audio-embedding":
        return SoundVectors(model, names)
    return Headed(model, names, head.outputs)


def input_specs(wrapped: Any, preprocessor: Preprocessor | None) -> tuple[TensorSpec, ...]:
    """Return the specs of the wrapper's inputs."""
    config: Any = wrapped.model.config
    names = tuple(inspect.signature(wrapped.forward).parameters)
    generates = isinstance(wrapped, EncoderDecoder)
    images, texts = ("images", "texts") if isinstance(wrapped, DualTowers) else ("batch", "batch")
    config = vision_config(config) if PIXELS in names and (generates or images != texts) else config
    specs = []
    pictures = (int(config.num_frames),) if _is_video(wrapped) else ()  # of a video
    for name in names:
        if name in (PIXELS, "pixel_mask"):
            size = image_size(config, preprocessor)
            channels = (*pictures, num_channels(config)) if name == PIXELS else ()
            dtype = "float32" if name == PIXELS else "int64"
            specs.append(TensorSpec(name, dtype, (images, *channels, *size)))
        elif name == SERIES:
            shape = (int(config.context_length), int(config.num_input_channels))
            specs.append(TensorSpec(name, "float32", ("batch", *shape)))
        elif name == "bbox":
            specs.append(TensorSpec(name, "int64", (texts, "seq", 4)))
        elif SOUND in names:
            dtype = "float32" if name == SOUND else "int64"
            specs.append(TensorSpec(name, dtype, ("batch", *sound_size(config))))
        elif FEATURES in names and not generates:
            any_time = "attention_mask" in names
            sizes = features_shape(config, any_time=any_time, bands=frame_width(wrapped.model))
            dtype, sizes = ("float32", sizes) if name == FEATURES else ("int64", sizes[:1])
            specs.append(TensorSpec(name, dtype, ("batch", *sizes)))
        elif name == FEATURES:
            frames = 2 * int(config.max_source_positions)
            specs.append(TensorSpec(name, "float32", ("batch", int(config.num_mel_bins), frames)))
        else:
            is_source = generates and name == "input_ids"
            specs.append(TensorSpec(name, "int64", (texts, "source" if is_source else "seq")))
    return tuple(specs)


def num_channels(config: Any) -> int:
    """Return the channels of the images that a model takes, 3 where its configuration does not say."""
    found = getattr(config, "num_channels", None)
    return found if found in (1, 3) else 3


def size_bounds(
    plan: Plan, config: Mapping[str, Any], model: nn.Module, specs: tuple[TensorSpec, ...]
) -> dict[str, tuple[int, int]]:
    """Return (smallest, largest) of the symbolic sizes of the inputs."""
    positions = position_limit(model) or config.get("max_position_embeddings") or config.get("max_seq_len")
    positions = config.get("max_target_positions") or positions
    longest = min(plan.max_length, positions) if isinstance(positions, int) else plan.max_length
    known = {
        "batch": (1, plan.max_batch),
        "images": (1, plan.max_batch),
        "texts": (1, MOST_TEXTS),
        "seq": (1, longest),
        "source": (1, longest),
        "samples": (int(SECONDS[0] * RATE), int(SECONDS[1] * RATE)),
        "frames": (SMALLEST_FRAMES, LARGEST_FRAMES),
        "height": (SMALLEST_IMAGE, LARGEST_IMAGE),
        "width": (SMALLEST_IMAGE, LARGEST_IMAGE),
    }
    used = {size for spec in specs for size in spec.shape}
    return {name: bounds for name, bounds in known.items() if name in used}


def image_size(config: Any, preprocessor: Preprocessor | None = None) -> tuple[int | str, int | str]:
    """Return height and width of the images that a model takes, names where they are not fixed."""
    if isinstance(preprocessor, ImagePreprocessor | TransformersProcessor):
        return preprocessor.output_size or ("height", "width")
    size = getattr(config, "image_size", None) or getattr(config, "input_size", None)
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) == 2:
        return int(size[0]), int(size[1])
    return "height", "width"


def _gives_mask(preprocessor: Preprocessor | None) -> bool:
    if isinstance(preprocessor, TransformersProcessor):
        return "pixel_mask" in preprocessor.tensors
    return isinstance(preprocessor, ImagePreprocessor) and preprocessor.pads


def _is_video(wrapped: Any) -> bool:
    return type(wrapped.model).__name__.endswith("ForVideoClassification")


def _takes(model: nn.Module, name: str) -> bool:
    return name in inspect.signature(model.forward).parameters
