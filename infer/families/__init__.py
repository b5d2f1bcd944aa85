"""Families of models: everything particular to a family in one file of its own.

A file `NAME.py` defines `FAMILY`, a `Family`. Each field is a table from a name that models or files have, such as the
class of a layer, to what is particular under that name. A family fills the fields that it needs; one that is like Llama
in everything has no file. Functions that several families name stand in files that begin with `_`.

Third parties add a family by an entry point of the group `infer.families` to such a module, which may also register its
configuration and model with transformers. All of them are imported when the first model of transformers or the first
GGUF file is opened, and never for other sources.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from .. import plugins
from ..errors import InferError, NotUsableError, SourceError
from ._gguf_layout import GgufLayout
from ._pre_tokenizers import PreTokenizer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..kernels.ops.state_space.state_call import StateCall

FOLDER = "infer.families"

__all__ = [
    "Attend",
    "Family",
    "GgufLayout",
    "ImageDecoder",
    "Mixer",
    "PreTokenizer",
    "Refusal",
    "Replacement",
    "TowerPair",
    "class_name",
    "known",
]

# (layer, query, key, value, **arguments) → [1, tokens, query heads, width]. Query is [1, query heads, tokens, width],
# key and value have key heads. Arguments: scaling, sliding_window, softcap, slopes of ALiBi.
Attend = Callable[..., "Tensor"]
# (layer, x [tokens, hidden], state) → what the layer's forward returns, its first or only tensor [tokens, hidden].
Mixer = Callable[[Any, "Tensor", "StateCall"], "Tensor | tuple[Any, ...]"]


class Replacement(NamedTuple):
    """Code of a layer with attention of its own within a step of a language model: `compute(attend, layer, …)`.

    It stands in for `method` of the layer, takes its arguments, and calls `attend` where tokens are mixed.
    """

    compute: Callable[..., Any]
    method: str = "forward"


class ImageDecoder(NamedTuple):
    """Class of transformers that writes text about an image, and what differs from its VisionEncoderDecoderModel.

    `parts`: class of transformers → subclass with the parts of an encoder-decoder (`get_encoder`, `get_decoder`, and
    `encode_source` where the encoder reads a text beside the image). `tokens`: configuration → special tokens of its
    generation that other settings do not tell. `prompts`: configuration → metadata by which prompts are made.
    """

    parts: Callable[[Any], type] | None = None
    tokens: Callable[[Any], dict[str, Any]] | None = None
    prompts: Callable[[Any], dict[str, Any]] | None = None


class TowerPair(NamedTuple):
    """Comparison of images with texts by two towers, where it is not CLIP's."""

    activation: str = "softmax"  # of the logits of an image
    pads: bool = False  # trained on texts padded to the longest length, whose padding is read too
    pooled: bool = False  # by the pooled outputs of towers without projections


class Refusal(NamedTuple):
    """Reason why no task fits an architecture, after its name; in `hint`, {name} is that name."""

    why: str
    hint: str = ""
    error: type[InferError] = SourceError


@dataclass(frozen=True, kw_only=True)
class Family:
    """Particularities of a family of models, by the names under which they are looked up.

    A class is named as in `class_name`; a model type is that of a configuration of transformers.
    """

    # Architecture in the metadata of a GGUF file → settings and tensors there.
    gguf: Mapping[str, GgufLayout] = field(default_factory=dict)
    # Name of a pre-tokenizer in the metadata of a GGUF file → how it splits a text.
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)
    # Class of an attention module that bypasses transformers' attention interface → its code within a step.
    attention: Mapping[str, Replacement] = field(default_factory=dict)
    # Class of a layer with a state of its own → its code over a state cache.
    mixers: Mapping[str, Mixer] = field(default_factory=dict)
    # Class of a layer → class put before it; for experts a subclass of `StoredExperts`.
    layers: Mapping[str, type[nn.Module]] = field(default_factory=dict)
    # Model type of a language tower without a causal model → model type that has one, and further settings.
    towers: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)
    # Class of a model → how it writes text about an image.
    image_decoders: Mapping[str, ImageDecoder] = field(default_factory=dict)
    # Model type → how its towers compare images with texts.
    tower_pairs: Mapping[str, TowerPair] = field(default_factory=dict)
    # Model type → change of the built model, before weights are read.
    patches: Mapping[str, Callable[[Any], nn.Module]] = field(default_factory=dict)
    # Model type → configuration → the longest sequence that a step computes as transformers does, and why; or None.
    exact_lengths: Mapping[str, Callable[[Any], tuple[int, str] | None]] = field(default_factory=dict)
    # Pattern of the whole name of an architecture → why it is refused.
    refused: Mapping[str, Refusal] = field(default_factory=dict)


@cache
def known() -> Family:
    """Return all families as one; raise `InferError` where two say something under the same name."""
    merged: dict[str, dict[str, Any]] = {each.name: {} for each in fields(Family)}
    for name in plugins.names(FOLDER):
        family = _family(name)
        for table, held in merged.items():
            own = getattr(family, table)
            if twice := held.keys() & own.keys():
                raise InferError(f"the family {name} has {min(twice)!r} in `{table}`, as another family has")
            held |= own
    return Family(**merged)


def _family(name: str) -> Family:
    try:
        found = getattr(plugins.get(FOLDER, name), "FAMILY", None)
    except (ImportError, AttributeError) as error:
        raise NotUsableError(
            f"the family {name} can't be imported: {error}",
            hint=f"Mend or uninstall the package with this entry point of {FOLDER}",
        ) from error
    if not isinstance(found, Family):
        raise NotUsableError(f"expected `FAMILY`, a Family, in the module of {name}", where=FOLDER)
    return found


def class_name(module: nn.Module) -> str:
    """Return the name of a module's class: alone of transformers' classes, with the Python module's of others."""
    kind = type(module)
    if kind.__module__.startswith("transformers."):
        return kind.__name__
    return f"{kind.__module__}.{kind.__qualname__}"
