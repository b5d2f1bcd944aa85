"""Hugging Face folders: the model from transformers, weights from safetensors, no code from the folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from ...errors import NotUsableError, SourceError, UnsafeSourceError
from ...plan import Plan
from ...spec import Finding, TensorSpec
from .. import heads
from ..checkpoint.transformers_key_mapping import convert_names
from ..checkpoint.weight_files import open_weights
from ..hf_preprocessor import Preprocessor, preprocessing_finding, read_preprocessor
from ..loaded_model import LoadedModel
from ..model_metadata import metadata, processor_metadata, read_json, unused_generation_settings
from ..model_patches.dynamic_rope import FixedFrequencies, fix_frequencies
from ..model_patches.longformer_attention import use_masked_attention
from ..model_patches.moe_layers import checkpoint_names, split_experts
from ..model_patches.sinusoidal_positions import compute_position_tables
from ..model_patches.vlm_language_model import TowerReader, has_tower, tower_config, tower_settings
from ..quantized_weights import open_quantized
from ..sentence_transformers.sentence_transformers import SentenceFolder, read_sentence_folder
from ..weight_loading.meta_model import CheckpointMatch, build_on_meta, match_checkpoint
from ..weights import FiniteReader, WeightReader, num_bytes

CARRIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "merges.txt",
    "vocab.json",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
)


def load_huggingface(plan: Plan, weights: WeightReader | None = None, where: str = "") -> LoadedModel:
    """Load config, tokenizer files and the model on the meta device, wrapped to take and give plain tensors.

    `weights`: reader of the weights where the folder holds none, and `where` they lie, for messages.
    """
    sentence = read_sentence_folder(Path(plan.source))
    folder = sentence.transformer
    config = read_json(folder / "config.json")
    _refuse_code(config, folder)
    _require_transformers()
    possible, refusal = _possible(config, folder, sentence)
    reader, pickled = (weights, "") if weights is not None else open_weights(folder)
    quantized = config.get("quantization_config") or config.get("quantization")
    stored_bytes = num_bytes(reader)
    if quantized:
        reader, decoded = open_quantized(reader, quantized, str(folder / "config.json"))
    part = _choose_part(plan, config, folder, sentence, possible, reader)
    name, settings, config, tower = part.name, part.settings, part.config, part.tower
    reader = reader if tower is None else tower
    head, model_class, given = _choose_class(plan, part, folder, refusal)
    preprocessor, steps = _preprocessing(folder, head, settings)

    def build() -> tuple[nn.Module, list[Finding], FixedFrequencies | None]:
        made, found = build_on_meta(lambda: heads.build(model_class, settings), name)
        made = use_masked_attention(made)
        return compute_position_tables(made, reader.names()), found, fix_frequencies(made)

    def wrap(model: nn.Module) -> nn.Module:
        if given:
            return heads.wrap_tensors(model, [spec.name for spec in given])
        return heads.wrap(model, head, sentence, preprocessor)

    model, findings, fixed = build()
    if fixed is not None:
        config = {**config, "max_position_embeddings": fixed.longest}
        findings.append(fixed.finding())
    wrapped = wrap(model)
    joined = sentence.reader(convert_names(reader, model, str(folder)))
    fit = _match(wrapped, model, joined, plan.key, where or str(folder))
    findings += [*heads.attention_findings(model), *steps, *_unused_tensors(fit)]
    findings += [decoded] if quantized else _stored_as(reader) if weights is None else []
    findings += [Finding("load", "checkpoint", pickled)] if pickled else []
    findings += [tower.finding(name)] if tower is not None else []
    findings += [heads.whole_finding()] if head == heads.DUAL_TOWERS else []
    findings += [heads.tensors_finding(name, given)] if given else heads.other_class(name, model_class)
    inputs = given or heads.input_specs(wrapped, preprocessor)
    sizes = heads.size_bounds(plan, config, model, inputs)
    meta = metadata(config, head.task, sentence, sizes) | processor_metadata(preprocessor, settings)
    meta |= heads.whole_meta(settings.model_type) if head == heads.DUAL_TOWERS else {}
    return LoadedModel(
        kind="huggingface",
        module=wrapped,
        reader=FiniteReader(joined, where or str(folder)),
        inputs=inputs,
        samples={},
        samples_from="",
        outputs=head.outputs,
        task=head.task,
        sizes=sizes,
        renames=fit.renames,
        files={name: folder / name for name in CARRIED if (folder / name).is_file()},
        meta=meta,
        preprocessor=preprocessor,
        stored_as=str(quantized.get("quant_method", "codes")) if quantized else "",
        weight_bytes=stored_bytes if quantized else num_bytes(reader),
        findings=findings,
        limitations=unused_generation_settings(config, folder) if head.task == "text-generation" else [],
        rebuild=lambda: split_experts(wrap(build()[0])),
    )


def _possible(
    config: dict[str, Any], folder: Path, sentence: SentenceFolder
) -> tuple[tuple[heads.Head, ...], SourceError | None]:
    """Return the heads for an architecture, or that of a function of tensors and the reason why there is no other."""
    try:
        found = heads.candidates(config, folder, sentence)
    except SourceError as refusal:
        return (heads.TENSORS,), refusal
    if found:
        return found, None
    return (heads.ANY_TENSORS,), heads.no_task(heads.architecture(config), folder)


def _choose_class(
    plan: Plan, part: _Part, folder: Path, refusal: SourceError | None
) -> tuple[heads.Head, type, tuple[TensorSpec, ...]]:
    """Return the head, the class of the model and, of one without a task, its inputs; raises `SourceError`."""
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


class _Part(NamedTuple):
    """Model that is made of a folder: the whole one, one of two towers, or the language model of a larger one.

    `tower`: reader of the language model's weights, None for others.
    """

    name: str
    settings: Any
    config: dict[str, Any]
    heads: tuple[heads.Head, ...]
    tower: TowerReader | None = None


def _choose_part(
    plan: Plan,
    config: dict[str, Any],
    folder: Path,
    sentence: SentenceFolder,
    possible: tuple[heads.Head, ...],
    reader: WeightReader,
) -> _Part:
    """Choose by `plan.key` and the architecture; raise `UsageError` for a key that names no tower."""
    name, settings = heads.choose_tower(plan.key, heads.architecture(config), _settings(folder))
    if plan.key is not None:
        config = {**settings.to_dict(), "architectures": [name]}
        return _Part(name, settings, config, heads.candidates(config, folder, sentence))
    if (whole := heads.whole_config(config, name, settings)) is not None:
        return _Part(name, settings, whole, (heads.DUAL_TOWERS,))
    if possible[0].task == "text-generation" and has_tower(config, name):
        tower = TowerReader(reader)
        settings = tower_settings(settings, tower, str(folder))
        return _Part(name, settings, tower_config(config), possible, tower)
    return _Part(name, settings, config, possible)


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise NotUsableError(
            "a Hugging Face folder needs the package transformers", hint="pip install 'infer[hf]'"
        )


def _refuse_code(config: Mapping[str, Any], folder: Path) -> None:
    remote = config.get("auto_map")
    if remote:
        named = ", ".join(map(str, remote.values())) if isinstance(remote, dict) else str(remote)
        raise UnsafeSourceError(
            f"the folder wants code of its own to be run (auto_map: {named[:200]})",
            where=str(folder / "config.json"),
            hint="Code in a model folder is never run: put it in a file of yours and name it by --model",
        )


def _settings(folder: Path) -> Any:
    """Load the configuration object of transformers."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (
        *(ValueError, KeyError, TypeError, AttributeError, RecursionError, ArithmeticError),
        StrictDataclassError,
    ) as error:
        raise SourceError(
            f"transformers can't read the configuration: {' '.join(str(error).split())[:200]}",
            where=str(folder / "config.json"),
            hint="Check `model_type` and its sizes, or install the transformers that wrote it",
        ) from error


def _match(
    wrapped: nn.Module, model: nn.Module, reader: WeightReader, tower: str | None, where: str
) -> CheckpointMatch:
    """Match parameters of a wrapped model, its experts split, with stored tensors; raise `SourceError` for absent ones.

    `tower`: the prefix of its names in the folder of a model of several; `where` the weights lie, for messages.
    """
    split_experts(wrapped)
    stored = checkpoint_names(wrapped)
    found = match_checkpoint(wrapped, reader, lambda name: _other_names(stored.get(name, name), model, tower))
    found.check(where, strict=False)
    return found


def _other_names(name: str, model: nn.Module, tower: str | None) -> list[str]:
    """List checkpoint names of a wrapped parameter: with and without the base model's prefix, old LayerNorm names.

    `tower`: the prefix of its names in the folder of a model of several.
    """
    inner = name.removeprefix("model.")
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    names = [inner, prefix + inner, inner.removeprefix(prefix), f"model.{inner}"]
    names += [f"{tower}.{inner}"] if tower is not None else []
    old = [
        n.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
        for n in names
    ]
    return names + old


def _stored_as(reader: WeightReader) -> list[Finding]:
    stored = sorted({str(reader.dtype(name)).removeprefix("torch.") for name in reader.names()})
    findings = [Finding("load", "weights", num_bytes(reader) / 1e6, "MB", f"stored as {', '.join(stored)}")]
    if {"float16", "bfloat16"} & set(stored):
        why = "the float original is the checkpoint in float32, which holds its values exactly"
        findings.append(Finding("load", "upcast", "float32", why=why))
    return findings


def _unused_tensors(fit: CheckpointMatch) -> list[Finding]:
    if not fit.unexpected:
        return []
    left = f"the model does not use {', '.join(fit.unexpected[:8])}"
    return [Finding("load", "tensors left", len(fit.unexpected), why=left)]


def _preprocessing(
    folder: Path, head: heads.Head, settings: Any
) -> tuple[Preprocessor | None, list[Finding]]:
    """Read the preprocessing of images or sound; text has its tokenizer."""
    if head.reads not in (heads.PIXELS, heads.SOUND, heads.FEATURES):
        return None, []
    if head.task == "video-classification":
        why = "infer decodes no video files"
        return None, [preprocessing_finding(None, why)]
    found, why = read_preprocessor(folder, head.reads, heads.num_channels(settings))
    return found, [preprocessing_finding(found, why)]
