"""Task, tokenizer, labels and preprocessing of a model file, from the folder that describes it: config.json and others.

Optimum writes them beside `model.onnx` and `openvino_model.xml`; repositories of the Hub have the file in a folder
`onnx/` or `openvino/` of the one that describes it. A file whose tensors are not those of its architecture's task stays
a function of tensors, and a finding says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from ...errors import InferError, NotUsableError
from ...plan import Plan
from ...regular_files import read_json
from ...spec import BATCH, Finding, TensorSpec
from .. import heads
from ..converted_tokenizer import ConvertedTokenizer, convert_tokenizer
from ..heads.wrappers import Headed, OneChoice, SourceHead
from ..hf_preprocessor import Preprocessor
from ..loaded_model import LoadedModel
from ..model_metadata import head_metadata, metadata
from ..sentence_transformers.sentence_folder import SentenceFolder, read_sentence_folder
from ..weight_loading.meta_model import build_on_meta
from .huggingface import carried_files, read_preprocessing, require_transformers
from .huggingface_class import possible_heads, read_settings

SENTENCE_EMBEDDING = "sentence_embedding"  # of a sentence-transformers model with its pooling
BY_TOKEN = ("token-classification", "question-answering", "fill-mask")  # tasks with an answer for each token
OPTIONAL = frozenset(("token_type_ids",))  # of a text alone they are zeros, which a file may have folded


def described(plan: Plan, loaded: LoadedModel, folder: Path) -> LoadedModel:
    """Return a file with the task of the folder that describes it, where its tensors are those of the task."""
    try:
        return _described(plan, loaded, folder)
    except InferError as error:
        return loaded.saying(Finding("load", "task", "tensors", why=str(error)))


@dataclass(frozen=True)
class _Model:
    """The model that a folder describes, without weights, as its task reads and answers."""

    head: heads.Head
    wrapped: nn.Module
    sentence: SentenceFolder
    preprocessor: Preprocessor | None
    findings: tuple[Finding, ...]
    config: dict[str, Any]
    settings: Any

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the outputs that its task answers with."""
        return (SENTENCE_EMBEDDING,) if self.head.outputs == ("embedding",) else self.head.outputs


def _described(plan: Plan, loaded: LoadedModel, folder: Path) -> LoadedModel:
    model = _model(folder)
    expected = heads.input_specs(model.wrapped, model.preprocessor)
    inputs = _fitted(loaded.loose, expected)
    outputs = _ordered(model, loaded.loose_outputs)
    renamed = {
        old: new
        for before, after in zip(loaded.loose, inputs, strict=True)
        for old, new in zip(before.shape, after.shape, strict=True)
        if isinstance(old, str)
    }
    tokens = "seq" if model.head.task in BY_TOKEN else ""
    outputs = tuple(_renamed(spec, renamed, tokens) for spec in outputs)
    sizes = heads.size_bounds(plan, model.config, model.wrapped, inputs)
    task = model.head.task
    meta = metadata(model.config, task, model.sentence, sizes)
    meta |= head_metadata(model.head, model.preprocessor, model.settings, folder)
    has_text = any(spec.name == "input_ids" for spec in inputs)
    tokenizer = convert_tokenizer(folder) if has_text else ConvertedTokenizer({}, [])
    why = f"{heads.architecture(model.config)}, which {folder / 'config.json'} names"
    return replace(
        loaded,
        inputs=inputs,
        loose=inputs,
        loose_outputs=outputs,
        uncertain=frozenset(),
        outputs=tuple(spec.name for spec in outputs),
        task=task,
        sizes=sizes,
        files={**carried_files(folder), **tokenizer.files},
        directory=tokenizer.directory,
        meta={**meta, **loaded.meta, "outputs": outputs},
        preprocessor=model.preprocessor,
    ).saying(Finding("load", "task", task, why=why), *model.findings, *tokenizer.findings)


def _model(folder: Path) -> _Model:
    """Build the model that a folder describes, on the meta device; raise `InferError` where no task of ours fits."""
    require_transformers()
    sentence = read_sentence_folder(folder)
    config = read_json(sentence.transformer / "config.json")
    possible, refusal = possible_heads(config, sentence.transformer, sentence)
    if refusal is not None:
        raise refusal
    settings, name = read_settings(sentence.transformer), heads.architecture(config)
    head, model_class = heads.choose(possible, name, settings, sentence.transformer)
    if head.task == "text-generation":
        raise NotUsableError(f"{name} generates, for which infer takes its model of torch")
    preprocessor, steps = read_preprocessing(folder, head, settings)
    model, _ = build_on_meta(lambda: heads.build(model_class, settings), name)
    wrapped = heads.wrap(model, head, sentence, preprocessor)
    passes_on = isinstance(wrapped, Headed) and not isinstance(wrapped, OneChoice | SourceHead)
    if not passes_on and head.task != "embedding":
        raise NotUsableError(
            f"the answers of {name} are computed of several of its outputs, by its model of torch"
        )
    return _Model(head, wrapped, sentence, preprocessor, tuple(steps), config, settings)


def _fitted(declared: Sequence[TensorSpec], expected: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the inputs of a file with the sizes that its task names; raise `NotUsableError` where they are others."""
    known = {spec.name: spec for spec in expected}
    if "input_ids" in known:  # an encoder of single texts leaves out what is 0 in all of them
        known |= {
            name: TensorSpec(name, "int64", known["input_ids"].shape) for name in OPTIONAL - known.keys()
        }
    names = {spec.name for spec in declared}
    if foreign := sorted(names - known.keys()):
        raise NotUsableError(f"the file takes {', '.join(foreign)}, which its task does not make")
    if absent := sorted(known.keys() - names - OPTIONAL):
        raise NotUsableError(f"the file does not take {', '.join(absent)}, which its task needs")
    return tuple(_fit(spec, known[spec.name]) for spec in declared)


def _fit(spec: TensorSpec, known: TensorSpec) -> TensorSpec:
    pairs = list(zip(spec.shape, known.shape, strict=False))
    fixed = [size for size, wanted in pairs if isinstance(size, int) and size != wanted]
    if spec.dtype != known.dtype or len(spec.shape) != len(known.shape) or fixed:
        raise NotUsableError(f"the file takes {spec}, its task makes {known}")
    return known


def _ordered(model: _Model, declared: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the outputs of a file, those of its task first; raise `NotUsableError` where it has others."""
    known = {spec.name: spec for spec in declared}
    if absent := [name for name in model.outputs if name not in known]:
        why = ": the pooling is not in the file" if absent == [SENTENCE_EMBEDDING] else ""
        raise NotUsableError(f"the file gives {', '.join(known)} and no {', '.join(absent)}{why}")
    first = [known[name] for name in model.outputs]
    return (*first, *(spec for spec in declared if spec not in first))


def _renamed(spec: TensorSpec, names: dict[str, int | str], tokens: str) -> TensorSpec:
    """Return an output with the sizes that are those of inputs; without names the first is the batch, the second
    `tokens`, where that is given.
    """
    shape = [names.get(size, size) if isinstance(size, str) else size for size in spec.shape]
    if shape and shape[0] == f"{spec.keyword}_0":
        shape[0] = BATCH
    if tokens and len(shape) > 1 and shape[1] == f"{spec.keyword}_1":
        shape[1] = tokens
    return TensorSpec(spec.name, spec.dtype, tuple(shape))
