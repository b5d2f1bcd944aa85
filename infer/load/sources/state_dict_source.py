"""Checkpoints of tensors only (`.pt` state dict, `.safetensors`) with the user's model file."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ...errors import SourceError, UsageError
from ...plan import Plan
from ...spec import Finding
from ...weights import Checkpoint, finite, in_memory, num_bytes
from ...weights.nested_state_dict import refuse_expanded, unwrap
from ...weights.npz_archive import read_npz
from ...weights.safetensors_file import open_safetensors
from ...weights.torch_file import load_safely, open_torch
from ..checkpoint.checkpoint_names import fit_names, missing_batch_counters
from ..identification.identify import STATE_DICTS, identify
from ..identification.source_names import model_folder
from ..loaded_model import LoadedModel
from ..module_copies import separate
from ..weight_loading.fill_weights import assign
from ..weight_loading.meta_model import build_on_meta
from .user_module import UserModule

SAVE_WEIGHTS = "Take the safetensors of this model, or save it once with model.save_pretrained(folder)"


def fit_checkpoint(
    build: Callable[[], nn.Module],
    text: str,
    checkpoint: Checkpoint,
    where: str,
    *,
    key: str,
    ignore: Iterable[str],
    notes: Iterable[str],
    wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
    prefix: str = "",
) -> LoadedModel:
    """Build a model, which `text` names, on meta and check every name and shape against the checkpoint (`fit_names`).

    `notes`: what was done to open the checkpoint; `wrap` gives the model the form that is called, where its names begin
    with `prefix`. Inputs, outputs and task are still to be told.
    """
    module, findings = build_on_meta(build, text)
    fit, renamed = fit_names(module, checkpoint, where, key=key, ignore=ignore)
    counters = missing_batch_counters(fit)
    findings += [Finding("load", "checkpoint", note) for note in (*notes, *renamed)]
    used = num_bytes(checkpoint, set(fit.found.values()))
    findings.append(Finding("load", "weights", used / 1e6, "MB", describe(checkpoint)))

    def rebuild() -> nn.Module:
        made, _ = build_on_meta(lambda: separate(build(), module), text)
        return wrap(_with_zero(made, counters))

    return LoadedModel(
        kind="state-dict",
        module=wrap(_with_zero(module, counters)),
        checkpoint=finite(checkpoint, where),
        inputs=(),
        renames={prefix + name: source for name, source in fit.found.items()},
        weight_bytes=used,
        findings=tuple(findings),
        rebuild=rebuild,
    )


def load_state_dict(plan: Plan, kind: str) -> tuple[LoadedModel, UserModule]:
    """Match `plan.model` with the checkpoint, which is read before the user's file is run.

    Raises `UsageError` without --model.
    """
    path = Path(plan.source)
    checkpoint, notes, key = open_checkpoint(path, kind, plan.key or "")
    if plan.model is None:
        raise UsageError(
            f"{path.name} {describe(checkpoint)}: weights without the model's code",
            where=str(path),
            hint=_missing_model(path),
        )
    user = UserModule(plan.model)
    fitted = fit_checkpoint(
        *(user.build, user.text, checkpoint, str(path)), key=key, ignore=plan.ignore_keys, notes=notes
    )
    known = kind if kind == "safetensors" else fitted.kind
    return replace(fitted, kind=known, inputs=user.inputs, outputs=user.outputs, task=user.task), user


def _missing_model(path: Path) -> str:
    if folder := model_folder(path):
        return f"It is a part of a Hugging Face folder: give that, {folder}"
    if path.suffix == ".npz":
        return (
            "Give the code of the model whose weights these are: --model net.py:build; arrays to run a model on are "
            "given with --data"
        )
    return "Give the Python file and the function that builds the model: --model net.py:build"


def open_checkpoint(path: Path, kind: str, key: str = "") -> tuple[Checkpoint, list[str], str]:
    """Open a checkpoint of a kind, of the mapping `key` in it.

    Also return what was unwrapped, and the rest of `key` that names no mapping: a prefix of names.
    """
    if kind == "safetensors":
        return open_safetensors(path).weights, [], key
    if kind == "npz":
        return read_npz(path), ["a NumPy archive: read whole into memory"], key
    if kind == "state-dict":
        return open_torch(path, verify=True, key=key)
    tensors, notes, rest = unwrap(load_safely(path), str(path), key)
    refuse_expanded(tensors, str(path))
    return in_memory(tensors), [*notes, "the format of torch before 1.6: read whole into memory"], rest


def open_weights_only(
    path: Path, key: str = "", *, expected: str = "weights", hint: str = SAVE_WEIGHTS
) -> tuple[Checkpoint, list[str], str]:
    """Open a checkpoint of any kind as `open_checkpoint` does.

    Raises `UnsafeSourceError` with `hint` for a pickle that names code, `SourceError` for a file of another kind.
    """
    found = identify(path)
    if found.code:
        raise found.refused(str(path), hint)
    if found.kind not in STATE_DICTS:
        raise SourceError(f"expected {expected}, got {found.says}", where=str(path))
    return open_checkpoint(path, found.kind, key)


def _with_zero(module: nn.Module, names: list[str]) -> nn.Module:
    """Set the named buffers of a module to 0, in place."""
    for name in names:
        owner, _, attribute = name.rpartition(".")
        assign(module.get_submodule(owner), attribute, torch.zeros((), dtype=torch.int64))
    return module


def describe(checkpoint: Checkpoint) -> str:
    """Summarize a checkpoint: `holds 34 tensors, first fc1.weight [128, 64]`."""
    if not checkpoint:
        return "holds no tensors"
    first = next(iter(checkpoint))
    return f"holds {len(checkpoint)} tensors, first {first} {list(checkpoint[first].shape)}"
