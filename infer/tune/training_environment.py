"""Surroundings of a training run: the Accelerate object, Ctrl-C, and the identity of what a checkpoint belongs to."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
from collections.abc import Mapping
from importlib.util import find_spec
from types import FrameType
from typing import Any

import msgspec
from torch import nn

from ..errors import NotUsableError
from .objective import Rows
from .settings import TrainSettings

AUTOCAST = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}
_FREE = {"checkpoint_every": 0.0, "fresh": False, "max_memory": None}  # settings that change no number


def missing() -> str | None:
    """Say why this installation can't train; None where it can."""
    if find_spec("accelerate") is None:
        return "training needs the package accelerate (pip install 'infer[tune]')"
    return None


def first_process() -> bool:
    """Return true in the one process of a distributed run that writes files, and in a run of one process."""
    from accelerate import PartialState

    return PartialState().is_main_process


def new_accelerator(settings: TrainSettings) -> Any:
    """Return Accelerate's object for this process, as `accelerate launch` or `torchrun` configured it.

    Raises `NotUsableError` for a precision that the device doesn't have, and for DeepSpeed, FSDP 1 and sharded
    parameters with another optimizer than AdamW.
    """
    if _switched_on("ACCELERATE_USE_DEEPSPEED"):
        raise NotUsableError(
            "DeepSpeed averages the means of micro-batches itself, which is not the mean over all tokens",
            hint="Configure DDP, or FSDP with fsdp_version: 2",
        )
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    # An earlier run of this process may have had another precision.
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        accelerator = Accelerator(mixed_precision=AUTOCAST[settings.precision], gradient_accumulation_steps=1)
    except ValueError as error:
        raise NotUsableError(
            f"this device can't train in {settings.precision}: {error}",
            hint="Use --precision bfloat16 or float32",
        ) from error
    state = accelerator.state
    if _switched_on("ACCELERATE_USE_FSDP") and state.distributed_type == DistributedType.MULTI_CPU:
        # Accelerate shards on accelerators only and would go on with whole copies, without a word.
        state.fsdp_plugin = FullyShardedDataParallelPlugin()
        state.distributed_type = DistributedType.FSDP
    if state.distributed_type == DistributedType.FSDP:
        _check_sharding(accelerator, settings)
    return accelerator


def _check_sharding(accelerator: Any, settings: TrainSettings) -> None:
    if not accelerator.is_fsdp2:
        raise NotUsableError("FSDP 1 has no gradient of single parameters", hint="Configure fsdp_version: 2")
    if settings.optimizer != "adamw":
        raise NotUsableError(
            f"{settings.optimizer} needs whole parameters, and FSDP shards them", hint="Use --optimizer adamw"
        )


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")


def identity(settings: TrainSettings, rows: Rows, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return digests by name of settings, parameters and data, which must equal those of a checkpoint to resume."""
    shapes = [(name, str(each.dtype), list(each.shape)) for name, each in parameters.items()]
    fixed = msgspec.structs.replace(settings, **_FREE)
    values = {"settings": msgspec.json.encode(fixed), "parameters": msgspec.json.encode(shapes)}
    found = {kind: hashlib.sha256(value).hexdigest()[:16] for kind, value in values.items()}
    return {**found, "data": rows.digest[:16]}


def step_seed(seed: int, step: int, process: int) -> int:
    """Return the seed of all random numbers that a process draws in a step."""
    text = f"{seed} {step} {process}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little") >> 1


class Interrupt:
    """Ctrl-C as a request that is met between two steps; a second one ends the process at once."""

    def __init__(self) -> None:
        self.asked = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN  # a job in the background
        if threading.current_thread() is threading.main_thread() and not ignored:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
