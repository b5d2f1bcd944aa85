"""The model of an architecture by transformers, on whatever device is current, and the head that fits it."""

from __future__ import annotations

import copy
import inspect
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from ... import families
from ...errors import NotUsableError, SourceError
from ...spec import Finding
from ..model_patches.listed_children import with_live_lists
from .image_decoders import encoder_decoder_class
from .table import DUAL_TOWERS, EMBEDDINGS, MASK_SEGMENTERS, PRETRAINING, SEQ2SEQ, SERIES, SPANS, Head

OTHER_MODALITIES = (
    *(
        "pixel_values",
        "pixel_values_videos",
        "input_features",
        "input_values",
        "bbox",
        "image",
        "past_values",
    ),
    *("past_time_features", "freq", "task_inputs", "text_inputs", "prompt_pixel_values", "input_points"),
)
PAGES = ({"bbox"}, {"bbox", "pixel_values"})  # of a text whose tokens stand on a page


def choose(heads: Sequence[Head], name: str, settings: Any, folder: Path) -> tuple[Head, type]:
    """Return the head that reads what the architecture's class reads, and the class.

    Raises `SourceError` where this version of transformers has no such class, or no head reads its inputs.
    """
    for head in heads:
        found = model_class(head, name, settings)
        if found is not None and _reads(found, head) and _gives(found, head) and _is_sized(head, settings):
            return head, found
    found = model_class(heads[0], name, settings)
    if found is None:
        raise SourceError(
            f"this version of transformers has no {name} for the model type {settings.model_type!r}",
            where=str(folder / "config.json"),
            hint="Check `architectures` and `model_type`, or install a newer transformers",
        )
    parameters = inspect.signature(found.forward).parameters
    if {"input_ids", "pixel_values"} <= set(parameters) and name.endswith("Model"):
        raise SourceError(
            f"{name} has a tower for texts and one for images, and transformers has no class for one of them with its "
            "projection",
            where=str(folder / "config.json"),
            hint="Give the tower's state dict and --model file.py:factory",
        )
    raise SourceError(
        _misfit(found, heads[0]),
        where=str(folder / "config.json"),
        hint="Give its state dict and --model file.py:factory, and name its tensors with --input",
    )


def _misfit(found: Any, head: Head) -> str:
    """Return the reason why no head fits a model class: its unsupported inputs or outputs."""
    if (
        _reads(found, head)
        or head.outputs == ("embedding",)
        and _reads(found, replace(head, reads="pixel_values"))
    ):
        if head.reads == SERIES:
            return f"expected series of one length and number of channels, but {found.__name__} takes {SERIES} of any"
        gives, is_embedder = ", ".join(output_fields(found)[:4]), head.outputs == ("embedding",)
        wanted = "hidden states (last_hidden_state)" if is_embedder else " and ".join(head.outputs)
        return f"expected a model of {wanted}, but {found.__name__} gives {gives}"
    given = [
        name for name in inspect.signature(found.forward).parameters if name not in ("self", "args", "kwargs")
    ]
    main = [name for name in given if name in ("input_ids", *OTHER_MODALITIES)]
    return (
        f"expected a model of text alone, images alone or sound alone, but {found.__name__} takes "
        f"{', '.join(main or given[:4] or [found.main_input_name])}"
    )


def _reads(found: Any, head: Head) -> bool:
    """Return true when all inputs of a model class are of the head's modality."""
    parameters = inspect.signature(found.forward).parameters
    takes = [name for name in parameters if name in OTHER_MODALITIES]
    if head.task in ("text-generation", DUAL_TOWERS.task):
        several = head.auto == SEQ2SEQ and takes  # a source of text and of another kind
        return head.reads in parameters and not several
    if head.reads == "input_ids":
        is_page = set(takes) in PAGES and head.outputs != ("embedding",)
        return (not takes or is_page) and "input_ids" in parameters
    return takes == [head.reads] and "input_ids" not in parameters


def _is_sized(head: Head, settings: Any) -> bool:
    """Return True unless a model of time series has no fixed length and number of channels (TimesFM takes a list)."""
    return head.reads != SERIES or all(
        hasattr(settings, name) for name in ("context_length", "num_input_channels")
    )


def _gives(found: Any, head: Head) -> bool:
    """Return true unless the model class is known to return no hidden states for an embedding."""
    fields = output_fields(found)
    if head.ending in MASK_SEGMENTERS:
        return not fields or {"class_queries_logits", "masks_queries_logits"} <= set(fields)
    if head.outputs == SPANS:  # cells of a table (TAPAS), answers of a list (LXMERT)
        return not {"logits", "question_answering_score"} & set(fields)
    is_embedder = head.ending == "Model" and head.outputs == ("embedding",)
    return not is_embedder or not fields or bool({"last_hidden_state", "pooler_output"} & set(fields))


def output_fields(found: Any) -> list[str]:
    """Return the names of the outputs that the return annotation of a class of transformers promises, [] without."""
    from transformers.utils import ModelOutput

    given = inspect.signature(found.forward).return_annotation
    code = vars(sys.modules[found.__module__])
    kinds = (
        [code.get(word) for word in re.findall(r"\w+", given)]
        if isinstance(given, str)
        else [given, *get_args(given)]
    )
    outputs = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, ModelOutput))
    return [field for kind in outputs for field in getattr(kind, "__dataclass_fields__", ())]


def model_class(head: Head, name: str, settings: Any) -> Any:
    """Return transformers' class called `name`, else the one that the head's Auto class maps to, or None."""
    import transformers

    found = class_named(name, settings) if name.endswith(head.ending) else None
    if found is not None:
        return found
    mapping = getattr(transformers, head.auto_class)._model_mapping
    if type(settings) not in mapping:
        return None
    found = mapping[type(settings)]
    return found[0] if isinstance(found, tuple) else found


def base_class(name: str, settings: Any) -> Any:
    """Return transformers' class of a model without its head, or None."""
    return model_class(EMBEDDINGS[0], name, settings)


def class_named(name: str, settings: Any) -> Any:
    """Return transformers' class called `name` if it is a model of this configuration, else None."""
    import transformers

    found = getattr(transformers, name, None)
    is_model = isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)
    return found if is_model and isinstance(settings, getattr(found, "config_class", None) or ()) else None


def build(found: Any, settings: Any) -> nn.Module:
    """Build the model in float32, with eager attention for a class that has no other."""
    kind: Any = encoder_decoder_class(found)

    def made(attention: str) -> nn.Module:
        own = copy.deepcopy(settings)  # a model writes into its configuration
        model = kind._from_config(own, attn_implementation=attention, dtype=torch.float32)
        model.tie_weights()
        patch = families.known().patches.get(getattr(model.config, "model_type", ""))
        return with_live_lists(model if patch is None else patch(model))

    try:
        return made("sdpa")
    except ValueError as error:
        if "scaled_dot_product_attention" not in str(error):
            raise
        return made("eager")
    except ImportError as error:
        raise NotUsableError(f"{found.__name__} needs a package that is not here: {error}") from error


def other_class(name: str, found: type) -> list[Finding]:
    """Report the class that stands for a pre-training's, whose own head is left out, or for a base model's."""
    if name.endswith("Model") and found.__name__.endswith(("ForConditionalGeneration", "MTModel")):
        why = f"for {name}, whose output layer is the embedding of its tokens"
        return [Finding("load", "class", found.__name__, why=why)] if found.__name__ != name else []
    if not name.endswith(PRETRAINING):
        return []
    return [
        Finding(
            "load", "class", found.__name__, why=f"for {name}, whose heads of the pre-training are left out"
        )
    ]


def attention_findings(model: Any) -> list[Finding]:
    """Report eager attention where transformers' class of the model has no other."""
    has_attention = any("att" in type(module).__name__.lower() for module in model.modules())
    if getattr(model.config, "_attn_implementation", None) != "eager" or not has_attention:
        return []
    why = f"transformers' {type(model).__name__} has no scaled_dot_product_attention"
    return [Finding("load", "attention", "eager", why=why)]
