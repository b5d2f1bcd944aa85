"""Model class of a Hugging Face folder: its head by task, one of its towers, or a class without a task."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ... import families
from ...errors import SourceError
from ...library_errors import first_sentence
from ...options.values import HIDDEN_STATES
from ...plan import Plan
from ...regular_files import read_json
from ...spec import TensorSpec
from ...weights import Checkpoint
from .. import heads
from ..heads.image_decoders import decoder_metadata
from ..model_patches.vlm_language_model import (
    LanguageTower,
    has_tower,
    language_tower,
    tower_config,
    tower_settings,
)
from ..sentence_transformers.sentence_folder import SentenceFolder

Heads = tuple[heads.Head, ...]


class ModelPart(NamedTuple):
    """Part of a folder that becomes the model: the whole one, one of two towers, or the language model of a larger one.

    `tower`: the language model's weights, None for others.
    """

    name: str
    settings: Any
    config: dict[str, Any]
    heads: Heads
    tower: LanguageTower | None = None


def possible_heads(
    config: dict[str, Any], folder: Path, sentence: SentenceFolder
) -> tuple[Heads, SourceError | None]:
    """Return the heads of an architecture, or the head of a function of tensors and why there is no other."""
    try:
        found = heads.candidates(config, folder, sentence)
    except SourceError as refusal:
        return (heads.TENSORS,), refusal
    if found:
        return found, None
    return (heads.ANY_TENSORS,), heads.no_task(heads.architecture(config), folder)


def choose_class(
    plan: Plan, part: ModelPart, folder: Path, refusal: SourceError | None
) -> tuple[heads.Head, type, tuple[TensorSpec, ...]]:
    """Return the head, the class of the model and, of one without a task, its inputs; raises `SourceError`."""
    if plan.task == HIDDEN_STATES:
        return _hidden_states(plan, part, folder)
    if refusal is None:
        try:
            return *heads.choose(part.heads, part.name, part.settings, folder), ()
        except SourceError as error:
            refusal = error
    found = heads.class_named(part.name, part.settings)
    if found is None:
        raise refusal
    automatic = part.heads == (heads.ANY_TENSORS,)
    given = heads.tensor_inputs(plan, found, part.settings, refusal, automatic=automatic)
    return heads.TENSORS, found, given


def _hidden_states(
    plan: Plan, part: ModelPart, folder: Path
) -> tuple[heads.Head, type, tuple[TensorSpec, ...]]:
    """Return the model without its head, as a function of tensors; `SourceError` where its inputs are unknown."""
    where, found = str(folder / "config.json"), heads.base_class(part.name, part.settings)
    if found is None:
        raise SourceError(f"transformers has no base model for {part.name}", where=where)
    unknown = SourceError(f"the inputs of {found.__name__} do not follow from its configuration", where=where)
    return heads.TENSORS, found, heads.tensor_inputs(plan, found, part.settings, unknown, automatic=True)


def choose_part(
    plan: Plan,
    config: dict[str, Any],
    folder: Path,
    sentence: SentenceFolder,
    possible: Heads,
    checkpoint: Checkpoint,
) -> ModelPart:
    """Choose by `plan.key` and the architecture; raise `UsageError` for a key that names no tower."""
    name, settings = heads.choose_tower(plan.key, heads.architecture(config), read_settings(folder))
    if plan.key is not None:
        config = {**settings.to_dict(), "architectures": [name]}
        return ModelPart(name, settings, config, heads.candidates(config, folder, sentence))
    if (whole := heads.whole_config(config, name, settings)) is not None:
        return ModelPart(name, settings, whole, (heads.DUAL_TOWERS,))
    if possible[0].decodes_images:
        return ModelPart(name, settings, decoder_metadata(config, name, settings), possible)
    if possible[0].task == "text-generation" and has_tower(config, name):
        tower = language_tower(checkpoint)
        settings = tower_settings(settings, tower, str(folder))
        return ModelPart(name, settings, tower_config(config), possible, tower)
    return ModelPart(name, settings, config, possible)


def read_settings(folder: Path) -> Any:
    """Load the configuration object of transformers, or of a family that registers one with it."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    families.known()  # imports them, so that they are registered
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError),
        StrictDataclassError,
    ) as error:
        where = folder / "config.json"
        if read_json(where).get("model_type") is None:
            raise SourceError(
                "config.json names no `model_type`, as files of before 2020 do not",
                where=str(where),
                hint='Add it, and the class of the model: "model_type": "bert", "architectures": ["BertForMaskedLM"]',
            ) from error
        raise SourceError(
            f"transformers can't read the configuration: {first_sentence(error)}",
            where=str(where),
            hint="Check `model_type` and its sizes, or install the transformers that wrote it",
        ) from error
