"""Checkpoints of a training run: written beside their final name and renamed, so that a kill leaves a whole one.

FOLDER/step-00000120/   state.safetensors: trained parameters and optimizer states; state.json: counters and curve
FOLDER/best-00000100.safetensors   trained parameters at the best held-out measure
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ..errors import InferError, SourceError, UsageError
from ..paths import unfinished, writing
from ..regular_files import MAX_JSON, read_regular
from .objective import Rows
from .settings import TrainSettings
from .training_state import TrainState

STATE, TENSORS = "state.json", "state.safetensors"
_STEP = re.compile(r"step-(\d{8})")
_FREE = {"checkpoint_every": 0.0, "fresh": False, "max_memory": None}  # settings that change no number
CHOICES = "memory-choices.json"  # of a run with --max-memory


def identity(settings: TrainSettings, rows: Rows, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return digests by name of settings, parameters and data, which must equal those of a checkpoint to resume."""
    shapes = [(name, str(each.dtype), list(each.shape)) for name, each in parameters.items()]
    fixed = msgspec.structs.replace(settings, **_FREE)
    values = {"settings": msgspec.json.encode(fixed), "parameters": msgspec.json.encode(shapes)}
    found = {kind: hashlib.sha256(value).hexdigest()[:16] for kind, value in values.items()}
    return {**found, "data": rows.digest[:16]}


def save_checkpoint(folder: Path, state: TrainState, tensors: Mapping[str, Tensor]) -> Path:
    """Write a checkpoint and remove older ones; older ones stay where the disk is full."""
    final = folder / f"step-{state.step:08d}"
    with publish_folder(final) as staging:
        _write_tensors(staging / TENSORS, tensors)
        (staging / STATE).write_bytes(msgspec.json.encode(state))
        _sync(staging / STATE)
    _sync(folder)
    for step, path in _saved(folder):
        if step != state.step:
            shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob("best-*.safetensors"):
        if state.best_step is None or path != best_path(folder, state.best_step):
            path.unlink(missing_ok=True)
    return final


@contextmanager
def publish_folder(final: Path) -> Iterator[Path]:
    """Give a folder beside the final one, which becomes it at the end and is removed when an error is raised."""
    with unfinished(final.with_name(f".{final.name}.tmp")) as folder:
        shutil.rmtree(folder, ignore_errors=True)
        with writing(final):
            folder.mkdir(parents=True)
        yield folder
        if final.exists():
            shutil.rmtree(final)
        folder.rename(final)


def load_checkpoint(folder: Path, identity: Mapping[str, str]) -> tuple[TrainState, dict[str, Tensor]] | None:
    """Return the newest checkpoint, or None without any.

    Raises `SourceError` for a damaged one, `UsageError` for one of a run with other settings, data or parameters.
    """
    saved = _saved(folder)
    if not saved:
        return None
    path = saved[-1][1]
    try:
        state = msgspec.json.decode(read_regular(path / STATE, MAX_JSON), type=TrainState)
        tensors = load_file(path / TENSORS)
    except (msgspec.MsgspecError, SafetensorError, OSError, InferError) as error:
        raise SourceError(
            f"the checkpoint can't be read: {error}", where=str(path), hint="Start anew with --fresh"
        ) from error
    for kind, digest in identity.items():
        if state.identity.get(kind) != digest:
            raise UsageError(
                f"the checkpoint of step {state.step} was made with other {kind}",
                where=str(folder),
                hint="Give the same options and data, or start anew with --fresh",
            )
    return state, tensors


def remove_checkpoints(folder: Path) -> None:
    """Remove every checkpoint of the folder, and the folder where nothing else is in it."""
    for _, path in _saved(folder):
        shutil.rmtree(path)
    for path in (*folder.glob("best-*.safetensors"), *folder.glob(CHOICES)):
        path.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def save_best(folder: Path, step: int, parameters: Mapping[str, Tensor]) -> None:
    """Write the trained parameters of the best step so far."""
    path = best_path(folder, step)
    folder.mkdir(parents=True, exist_ok=True)
    with unfinished(path.with_suffix(".tmp")) as staging:
        _write_tensors(staging, parameters)
        staging.rename(path)


def restore_best(folder: Path, step: int, parameters: Mapping[str, Tensor]) -> None:
    """Put the trained parameters of the best step back."""
    _copy(parameters, load_file(best_path(folder, step)))


def best_path(folder: Path, step: int) -> Path:
    """Return the file of the trained parameters of a step."""
    return folder / f"best-{step:08d}.safetensors"


def run_tensors(
    parameters: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer]
) -> dict[str, Tensor]:
    """Return trained parameters and optimizer states by name; numbers of a state as scalars."""
    names = {parameter: name for name, parameter in parameters.items()}
    found: dict[str, Tensor] = {f"parameter/{name}": whole(each) for name, each in parameters.items()}
    for index, optimizer in enumerate(optimizers):
        for parameter, states in optimizer.state.items():
            for key, value in states.items():
                kind = "tensor" if isinstance(value, Tensor) else "number"
                tensor = (
                    whole(value)
                    if isinstance(value, Tensor)
                    else torch.tensor(value, dtype=_number_type(value))
                )
                found[f"optimizer/{index}/{kind}/{key}/{names[cast(nn.Parameter, parameter)]}"] = tensor
    return found


def restore(
    parameters: Mapping[str, nn.Parameter],
    optimizers: Sequence[torch.optim.Optimizer],
    tensors: Mapping[str, Tensor],
) -> None:
    """Put back what `run_tensors` returned, bit for bit."""
    prefix = "parameter/"
    _copy(parameters, {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
    for full, tensor in tensors.items():
        if not full.startswith("optimizer/"):
            continue
        _, index, kind, key, name = full.split("/", 4)
        parameter = parameters[name]
        held = tensor if key == "step" else _like(parameter, tensor)  # counters stay on the CPU
        optimizers[int(index)].state[parameter][key] = held.item() if kind == "number" else held


@torch.no_grad()
def _copy(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(_like(parameter, tensors[name]))


def whole(tensor: Tensor) -> Tensor:
    """Return a sharded tensor whole; every process has to ask. Others are returned as they are."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, tensor: Tensor) -> Tensor:
    """Return the tensor on the parameter's device, sharded like it where their shapes are equal."""
    placed = tensor.to(parameter.device)
    if isinstance(parameter, DTensor) and placed.shape == parameter.shape:
        return distribute_tensor(placed, parameter.device_mesh, parameter.placements)
    return placed


def _number_type(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


def _saved(folder: Path) -> list[tuple[int, Path]]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted((int(match[1]), path) for path in paths if (match := _STEP.fullmatch(path.name)))


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file that is on the disk afterwards."""
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)
    _sync(path)


def _sync(path: Path) -> None:
    """Make a file, or the renames in a folder, last through a power failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
