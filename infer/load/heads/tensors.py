"""Models of transformers without a task of their own, as functions of tensors.

Their inputs are those that `--input` names, or follow from the configuration where the model takes images of one size
or texts alone; their outputs are the tensors that the model returns, under transformers' names.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...errors import SourceError, UsageError
from ...named_inputs import NamedInputs
from ...plan import Plan
from ...spec import Finding, TensorSpec
from ..input_specs import asked_inputs
from .build import OTHER_MODALITIES
from .inputs import image_size, num_channels
from .table import FEATURES, PIXELS, SOUND, Head

TENSORS = Head("", "tensors", (), auto="AutoModel")  # of inputs that --input names
ANY_TENSORS = Head("", "tensors", (), "", "AutoModel")  # or of those that follow from the configuration
MASK, DECODER_IDS = "attention_mask", "decoder_input_ids"
# Sizes of the tensors that models of transformers take; others have to be looked up.
SHAPES = {
    "input_ids": "int64[batch,seq]",
    MASK: "int64[batch,seq]",
    DECODER_IDS: "int64[batch,seq]",
    "bbox": "int64[batch,seq,4]",
    "pixel_values_videos": "float32[batch,frames,3,height,width]",
    SOUND: "float32[batch,samples]",
}
MAIN = (PIXELS, "pixel_values_videos", SOUND, FEATURES, "input_ids", "past_values")


class TensorsModel(NamedInputs):
    """A model of transformers, `model`, as a function of the tensors `names` that returns a dict of tensors.

    Caches, attention maps and states of layers, which are tuples or objects, are left out.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model = model
        self.taking(names)

    def call(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: Any = self.model(**tensors)
        listed = found if isinstance(found, list | tuple) else (found,)
        named = found.items() if hasattr(found, "items") else enumerate(listed)
        return {str(name): value for name, value in named if isinstance(value, Tensor)}


def without_pooler(model: nn.Module, stored: Iterable[str]) -> list[Finding]:
    """Leave out a pooler whose weights the checkpoint lacks, as that of a model with another head does."""
    pooler = getattr(model, "pooler", None)
    if pooler is None or not list(pooler.parameters()) or any("pooler." in name for name in stored):
        return []
    model.register_module("pooler", None)
    return [Finding("load", "pooler", value=False, why="the checkpoint has no weights of it")]


def tensor_inputs(
    plan: Plan, found: Any, settings: Any, refusal: SourceError, *, automatic: bool
) -> tuple[TensorSpec, ...]:
    """Return the inputs of a class of transformers that infer has no task for.

    `refusal`: why there is no task, which is raised with an example of `--input` where the inputs are not given, unless
    they follow from the configuration and `automatic` allows that.
    """
    if asked := asked_inputs(plan):
        return _checked(tuple(asked.values()), found)
    names, known = example_inputs(found, settings)
    if known and automatic:
        return names
    shown = " ".join(f"--input '{spec.format()}'" for spec in names)
    raise SourceError(
        refusal.message,
        where=refusal.where,
        hint=f"It runs without a task, as a function of tensors: name those that you give, as in {shown}. "
        f"It takes {', '.join(_parameters(found)[:8])}",
    ) from refusal


def _checked(specs: tuple[TensorSpec, ...], found: Any) -> tuple[TensorSpec, ...]:
    known = inspect.signature(found.forward).parameters
    for spec in specs:
        if spec.name not in known:
            takes = ", ".join(_parameters(found)[:8])
            raise UsageError(
                f"{found.__name__} has no input named {spec.name!r}",
                where="--input",
                hint=f"It takes {takes}",
            )
    return specs


def example_inputs(found: Any, settings: Any) -> tuple[tuple[TensorSpec, ...], bool]:
    """Return inputs of a class, and True where all of them are known from the configuration."""
    size = image_size(settings)
    takes = _parameters(found)
    mains = [name for name in MAIN if name in takes] or takes[:1]
    if getattr(settings, "is_encoder_decoder", False) and DECODER_IDS in takes:
        mains.append(DECODER_IDS)
    if mains[0] == "input_ids" and MASK in takes:
        mains.append(MASK)
    mains += [name for name in takes if name in _required(found) - set(mains)]
    height, width = size
    shapes = {**SHAPES, PIXELS: f"float32[batch,{num_channels(settings)},{height},{width}]"}
    shapes |= {name: shape for name in (SOUND, FEATURES) if (shape := _spectrogram(name, found, settings))}
    specs = tuple(TensorSpec.parse(f"{name}={shapes.get(name, 'float32[batch,size]')}") for name in mains)
    sized = mains in (["input_ids"], ["input_ids", MASK]) or (mains == [PIXELS] and isinstance(height, int))
    others = set(takes) & set(OTHER_MODALITIES) - set(mains)
    return specs, sized and not others and _required(found) <= set(mains)


def _spectrogram(name: str, found: Any, settings: Any) -> str | None:
    """Return the sizes of a spectrogram in the order that a class reads them; None of samples of sound.

    Features of Whisper's extractor are [bands, frames]; the documentation of a class tells other cases apart, but is
    [frames, bands] by default.
    """
    from transformers.models.auto.feature_extraction_auto import FEATURE_EXTRACTOR_MAPPING_NAMES

    said = re.search(rf"{name}`? *\([^)]*of shape `?\(([^)]*)\)", found.forward.__doc__ or "")
    sizes = said[1] if said else ""
    if name == SOUND and "mel" not in sizes:
        return None
    kind = str(FEATURE_EXTRACTOR_MAPPING_NAMES.get(settings.model_type))
    bands = getattr(settings, "feature_projection_input_dim", None) or getattr(settings, "num_mel_bins", None)
    frames = getattr(settings, "max_length", "frames") if name == SOUND else "frames"
    if "Whisper" in kind or re.search("(feature_size|mel_bins), *(sequence|time)", sizes):
        return f"float32[batch,{bands or 'bands'},{frames}]"
    return f"float32[batch,{frames},{bands or 'bands'}]"


def _required(found: Any) -> set[str]:
    given = inspect.signature(found.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {p.name for p in given if p.name != "self" and p.kind in kinds and p.default is p.empty}


def tensors_finding(name: str, specs: Sequence[TensorSpec], *, asked: bool) -> Finding:
    """Report that a model runs without a task; `asked`: as --task features says."""
    given = ", ".join(spec.format() for spec in specs)
    why = f"--task features: {name} without its head" if asked else f"infer has no task for {name}"
    return Finding("load", "task", "tensors", why=f"{why}; it takes {given}")


def _parameters(found: Any) -> list[str]:
    """Return the tensors that `forward` of a class takes, without options and targets of training."""
    options = ("output_", "return_", "use_", "labels", "past_key_values", "kwargs", "interpolate")
    given = inspect.signature(found.forward).parameters
    return [name for name in given if name not in ("self", "args") and not name.startswith(options)]
