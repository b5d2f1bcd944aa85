"""Accelerate's object for this process, as `accelerate launch` or `torchrun` configured it."""

from __future__ import annotations

import atexit
import os
from importlib.util import find_spec
from typing import Any

import torch

from ..distribution import install
from ..errors import NotUsableError
from .settings import TrainSettings

AUTOCAST = {"float32": "no", "bfloat16": "bf16", "float16": "fp16"}


def missing() -> str | None:
    """Say why this installation can't train; None where it can."""
    if find_spec("accelerate") is None:
        return f"training needs the package accelerate ({install('tune')})"
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
    if accelerator.num_processes > 1:
        atexit.unregister(_end_group)
        atexit.register(_end_group)
    return accelerator


def _end_group() -> None:
    """End the threads of Gloo while the interpreter lives.

    They may hold tensors of Python, whose release afterwards aborts the process (pytorch pull request 179291). NCCL
    has no such fault, and to end a group of it where another process failed can hang.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_backend() == "gloo":
        torch.distributed.destroy_process_group()


def _check_sharding(accelerator: Any, settings: TrainSettings) -> None:
    if not accelerator.is_fsdp2:
        raise NotUsableError("FSDP 1 has no gradient of single parameters", hint="Configure fsdp_version: 2")
    if settings.optimizer != "adamw":
        raise NotUsableError(
            f"{settings.optimizer} needs whole parameters, and FSDP shards them", hint="Use --optimizer adamw"
        )


def _switched_on(name: str) -> bool:
    return os.environ.get(name, "").lower() in ("1", "true")
