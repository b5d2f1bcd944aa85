"""Task, tokenizer, labels and preprocessing of a model file, from the folder that describes it: config.json and others.

Optimum writes them beside `model.onnx` and `openvino_model.xml`; repositories of the Hub have the file in a folder
`onnx/` or `openvino/` of the one that describes it. A file whose tensors are not those of its architecture's task stays
a function of tensors, and a finding says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ...errors import InferError, NotUsableError
from ...plan import Plan
from ...regular_files import read_json
from ...spec import BATCH, Finding, TensorSpec
from .. import heads
from ..carried_files import carry
from ..heads.wrappers import Headed, OneChoice, SourceHead
from ..loaded_model import LoadedModel
from ..model_metadata import metadata
from ..sentence_transformers.sentence_folder import read_sentence_folder
from ..weight_loading.meta_model import build_on_meta
from .folder_model import FolderModel, read_model, require_transformers

SENTENCE_EMBEDDING = "sentence_embedding"  # of a sentence-transformers model with its pooling
BY_TOKEN = ("token-classification", "question-answering", "fill-mask")  # tasks with an answer for each token
OPTIONAL = frozenset(("token_type_ids",))  # of a text alone they are zeros, which a file may have folded


def described(plan: Plan, loaded: LoadedModel, folder: Path) -> LoadedModel:
    """Return a file with the task of the folder that describes it, where its tensors are those of the task."""
    try:
        return _described(plan, loaded, folder)
    except InferError as error:
        return loaded.saying(Finding("load", "task", "tensors", why=str(error)))


def _described(plan: Plan, loaded: LoadedModel, folder: Path) -> LoadedModel:
    require_transformers()
    sentence = read_sentence_folder(folder)
    config = read_json(sentence.transformer / "config.json")
    model = read_model(Plan(source=str(folder)), sentence, config, {})
    task = model.head.task
    if task == "text-generation":
        raise NotUsableError(f"{model.name} generates, for which infer takes its model of torch")
    built, _ = build_on_meta(lambda: heads.build(model.model_class, model.settings), model.name)
    wrapped = model.wrap(built)
    passes_on = isinstance(wrapped, Headed) and not isinstance(wrapped, OneChoice | SourceHead)
    if not passes_on and task != "embedding":
        raise NotUsableError(
            f"the answers of {model.name} are computed of several of its outputs, by its model of torch"
        )
    inputs = _fitted(loaded.loose, model.inputs(wrapped))
    outputs = _ordered(_outputs(model), loaded.loose_outputs)
    renamed = {
        old: new
        for before, after in zip(loaded.loose, inputs, strict=True)
        for old, new in zip(before.shape, after.shape, strict=True)
        if isinstance(old, str)
    }
    tokens = "seq" if task in BY_TOKEN else ""
    outputs = tuple(_renamed(spec, renamed, tokens) for spec in outputs)
    sizes = heads.size_bounds(plan, model.config, wrapped, inputs)
    carried = carry(model.folder, inputs)
    why = f"{model.name}, which {folder / 'config.json'} names"
    return replace(
        loaded,
        inputs=inputs,
        loose=inputs,
        loose_outputs=outputs,
        uncertain=frozenset(),
        outputs=tuple(spec.name for spec in outputs),
        task=task,
        sizes=sizes,
        files=carried.files,
        directory=carried.directory,
        meta={**metadata(model, sizes), **loaded.meta, "outputs": outputs},
        preprocessor=model.preprocessor,
    ).saying(Finding("load", "task", task, why=why), *model.steps, *carried.findings)


def _outputs(model: FolderModel) -> tuple[str, ...]:
    """Return the names of the outputs that the task answers with."""
    return (SENTENCE_EMBEDDING,) if model.head.outputs == ("embedding",) else model.head.outputs


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


def _ordered(wanted: Sequence[str], declared: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Return the outputs of a file, those of its task first; raise `NotUsableError` where it has others."""
    known = {spec.name: spec for spec in declared}
    if absent := [name for name in wanted if name not in known]:
        why = ": the pooling is not in the file" if absent == [SENTENCE_EMBEDDING] else ""
        raise NotUsableError(f"the file gives {', '.join(known)} and no {', '.join(absent)}{why}")
    first = [known[name] for name in wanted]
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
