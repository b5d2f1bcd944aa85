"""A library's model joined with its weights: a checkpoint, a folder of timm, or random ones on request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ...errors import UsageError
from ...plan import Plan
from ...spec import Finding
from ...weights import Checkpoint
from ..checkpoint.weight_files import open_weights
from ..hf_preprocessor import preprocessing_finding
from ..identification.source_names import LIBRARY_NAME
from ..loaded_model import LoadedModel
from ..sources.state_dict_source import fit_checkpoint, open_weights_only
from ..weight_loading.meta_model import build_on_meta
from .library_model import LibraryImageModel, LibraryModel, classes_in, input_size
from .timm_models import timm_folder, timm_model
from .torchvision_models import torchvision_model

RANDOM = "random"
RANDOM_NOTE = "its weights are random: size and speed mean something, answers do not"


def load_library_model(plan: Plan, name: str, weights: str | None) -> LoadedModel:
    """Open `timm:NAME` or `torchvision:NAME` with a checkpoint, or with random weights for "random".

    Raises `UsageError` for an unknown name and where weights are missing, `SourceError` for a checkpoint of another
    model, `NotUsableError` without the library.
    """
    model = _named(name)
    if weights is None:
        raise UsageError(
            f"{model.text} names a model, not its weights; nothing is downloaded",
            where="--weights",
            hint=f"Give a checkpoint of it: --weights FILE{_on_hub(model)}. "
            "'--weights random' measures size and speed only",
        )
    if weights == RANDOM:
        return _random(plan, model)
    expected, hint = f"a checkpoint of {model.text}", "Save model.state_dict() on its own"
    checkpoint, notes, key = open_weights_only(Path(weights), plan.key or "", expected=expected, hint=hint)
    return _with_weights(plan, model, checkpoint, (weights, key, notes))


def _on_hub(model: LibraryModel) -> str:
    """Name the repository of timm's own weights; it has a tag, of which a name without one may have several."""
    library, _, name = model.text.partition(":")
    tagged = name if "." in name else f"{name}.TAG"
    return f", or take timm's own from the Hub: infer optimize timm/{tagged}" if library == "timm" else ""


def load_timm_folder(plan: Plan) -> LoadedModel:
    """Open a folder of timm, config.json with its weights, as the Hub has them."""
    folder = Path(plan.source)
    model = timm_folder(folder)
    checkpoint, pickled = open_weights(folder)
    return _with_weights(plan, model, checkpoint, (str(folder), "", [pickled] if pickled else []))


def _named(text: str) -> LibraryModel:
    found = LIBRARY_NAME.fullmatch(text)
    if found is None:
        raise UsageError(f"expected timm:NAME or torchvision:NAME, got {text!r}")
    return (timm_model if found[1] == "timm" else torchvision_model)(found[2])


def _with_weights(
    plan: Plan, model: LibraryModel, checkpoint: Checkpoint, stored: tuple[str, str, list[str]]
) -> LoadedModel:
    """Build the model on meta with as many classes as the checkpoint has, and match every name and shape."""
    where, key, notes = stored
    module, _ = build_on_meta(lambda: model.build(model.num_classes), model.text)
    classes = classes_in(module, checkpoint, model, key)
    unread = [f"{part}*" for part in model.training_only if any(name.startswith(part) for name in checkpoint)]
    fitted = fit_checkpoint(
        *(lambda: model.build(classes), model.text, checkpoint, where),
        key=key,
        ignore=(*plan.ignore_keys, *unread),
        notes=notes,
        wrap=_wrapped,
        prefix="model.",
    )
    return _described(plan, model, fitted, classes)


def _random(plan: Plan, model: LibraryModel) -> LoadedModel:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(plan.seed)
            return _wrapped(model.build(model.num_classes))

    why = f"--weights random; seed {plan.seed}"
    loaded = LoadedModel("library", build(), None, (), rebuild=build, limitations=(RANDOM_NOTE,))
    loaded = loaded.saying(Finding("load", "weights", RANDOM, why=why))
    return _described(plan, model, loaded, model.num_classes)


def _wrapped(module: nn.Module) -> nn.Module:
    return LibraryImageModel(module).eval()


def _described(plan: Plan, model: LibraryModel, loaded: LoadedModel, classes: int) -> LoadedModel:
    """Return a library's model with its inputs, task and labels."""
    spec = input_size(plan, model)
    preprocessor, why = model.preprocess((spec.shape[2], spec.shape[3]))
    labels, whose = model.labels(classes) if classes else ([], "")
    gives = f"{classes} classes" if classes else "pooled features"
    findings = [
        Finding("load", "library model", model.text, why=gives),
        preprocessing_finding(preprocessor, why),
    ]
    findings += [Finding("load", "class names", len(labels), why=whose)] if labels else []
    meta: Mapping[str, Any] = {
        "architecture": model.text,
        **({"labels": labels} if labels else {}),
        **({"preprocessing": msgspec.to_builtins(preprocessor)} if preprocessor else {}),
    }
    return replace(
        loaded,
        kind="library",
        inputs=(spec,),
        outputs=("logits",) if classes else ("embedding",),
        task=model.task if classes else "image-embedding",
        meta=meta,
        preprocessor=preprocessor,
    ).saying(*findings)
