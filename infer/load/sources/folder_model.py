"""Model that a Hugging Face folder describes: its head by task, one of its towers, or a class without a task."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from ... import families
from ...distribution import install
from ...errors import NotUsableError, SourceError
from ...library_errors import first_sentence
from ...options.values import HIDDEN_STATES
from ...plan import Plan
from ...regular_files import read_json
from ...spec import Finding, TensorSpec
from ...weights import Checkpoint
from .. import heads
from ..heads.image_decoders import decoder_metadata, vision_config
from ..hf_preprocessor import Preprocessor, preprocessing_finding, read_preprocessor
from ..model_patches.vlm_language_model import (
    LanguageTower,
    has_tower,
    language_tower,
    tower_config,
    tower_settings,
)
from ..sentence_transformers.sentence_folder import SentenceFolder

Heads = tuple[heads.Head, ...]


@dataclass(frozen=True)
class FolderModel:
    """A model of transformers as a folder describes it: its class, how it reads and answers; without weights.

    `config` and `settings` are those of the part of the folder that becomes the model: the whole one, one of two
    towers, or the language model of a larger one, whose weights are `tower`. `given`: inputs of a function of tensors,
    which a class without a task is.
    """

    sentence: SentenceFolder
    name: str
    settings: Any
    config: dict[str, Any]
    head: heads.Head
    model_class: Any
    given: tuple[TensorSpec, ...]
    tower: LanguageTower | None
    preprocessor: Preprocessor | None
    steps: tuple[Finding, ...]  # of the preprocessing

    @property
    def folder(self) -> Path:
        """Folder of the model's config.json."""
        return self.sentence.transformer

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model with named tensors as inputs and outputs, in eval mode."""
        if self.given:
            return heads.TensorsModel(model, [spec.name for spec in self.given]).eval()
        return heads.wrap(model, self.head, self.sentence, self.preprocessor)

    def inputs(self, wrapped: nn.Module) -> tuple[TensorSpec, ...]:
        """Return the specs of the inputs of the wrapped model."""
        return self.given or heads.input_specs(wrapped, self.preprocessor)

    def findings(self, plan: Plan) -> list[Finding]:
        """Return why this part of the folder and this class were chosen, where that is not the usual one."""
        found = [] if self.tower is None else [self.tower.finding(self.name)]
        found += [heads.whole_finding()] if self.head == heads.DUAL_TOWERS else []
        if self.given:
            asked = plan.task == HIDDEN_STATES
            return [*found, heads.tensors_finding(self.name, self.given, asked=asked)]
        return [*found, *heads.other_class(self.name, self.model_class)]


def read_model(
    plan: Plan, sentence: SentenceFolder, config: dict[str, Any], checkpoint: Checkpoint
) -> FolderModel:
    """Choose part, class and head by the architecture, `plan.key` and `plan.task`, and read the preprocessing.

    `checkpoint`: the folder's weights, of which a language tower takes its own. Raises `UsageError` for a key that
    names no tower, `SourceError` where nothing fits.
    """
    folder, tower = sentence.transformer, None
    possible, refusal = _possible_heads(config, folder, sentence)
    name, settings = heads.choose_tower(plan.key, heads.architecture(config), read_settings(folder))
    if plan.key is not None:
        config = {**settings.to_dict(), "architectures": [name]}
        possible = heads.candidates(config, folder, sentence)
    elif (whole := heads.whole_config(config, name, settings)) is not None:
        config, possible = whole, (heads.DUAL_TOWERS,)
    elif possible[0].decodes_images:
        config = decoder_metadata(config, name, settings)
    elif possible[0].task == "text-generation" and has_tower(config, name):
        tower = language_tower(checkpoint)
        settings, config = tower_settings(settings, tower, str(folder)), tower_config(config)
    head, model_class, given = _choose_class(plan, possible, name, settings, folder, refusal)
    preprocessor, steps = _read_preprocessing(folder, head, settings)
    return FolderModel(
        sentence, name, settings, config, head, model_class, given, tower, preprocessor, tuple(steps)
    )


def _possible_heads(
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


def _choose_class(
    plan: Plan, possible: Heads, name: str, settings: Any, folder: Path, refusal: SourceError | None
) -> tuple[heads.Head, Any, tuple[TensorSpec, ...]]:
    """Return the head, the class of the model and, of one without a task, its inputs; raises `SourceError`."""
    if plan.task == HIDDEN_STATES:
        return _hidden_states(plan, name, settings, folder)
    if refusal is None:
        try:
            return *heads.choose(possible, name, settings, folder), ()
        except SourceError as error:
            refusal = error
    found = heads.class_named(name, settings)
    if found is None:
        raise refusal
    automatic = possible == (heads.ANY_TENSORS,)
    return heads.TENSORS, found, heads.tensor_inputs(plan, found, settings, refusal, automatic=automatic)


def _hidden_states(
    plan: Plan, name: str, settings: Any, folder: Path
) -> tuple[heads.Head, Any, tuple[TensorSpec, ...]]:
    """Return the model without its head, as a function of tensors; `SourceError` where its inputs are unknown."""
    where, found = str(folder / "config.json"), heads.base_class(name, settings)
    if found is None:
        raise SourceError(f"transformers has no base model for {name}", where=where)
    unknown = SourceError(f"the inputs of {found.__name__} do not follow from its configuration", where=where)
    return heads.TENSORS, found, heads.tensor_inputs(plan, found, settings, unknown, automatic=True)


def _read_preprocessing(
    folder: Path, head: heads.Head, settings: Any
) -> tuple[Preprocessor | None, list[Finding]]:
    """Read the preprocessing of images or sound; text has its tokenizer."""
    if head.reads not in (heads.PIXELS, heads.SOUND, heads.FEATURES):
        return None, []
    if head.task == "video-classification":
        why = "infer decodes no video files"
        return None, [preprocessing_finding(None, why)]
    found, why = read_preprocessor(folder, head.reads, heads.num_channels(vision_config(settings)))
    return found, [preprocessing_finding(found, why)]


def require_transformers() -> None:
    """Raise `NotUsableError` where the package transformers is absent."""
    if find_spec("transformers") is None:
        raise NotUsableError("a Hugging Face folder needs the package transformers", hint=install("hf"))


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
