"""Surroundings of a training run: the Accelerate object, Ctrl-C, and the identity of what a checkpoint belongs to."""

from __future__ import annotations

import hashlib
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
_FREE = {"checkpoint_every": 0.0, "fresh": False}  # settings that change no number


def missing() -> str | None:
    """Say why this installation can't train; None where it can."""
    if find_spec("accelerate") is None:
        return "training needs the package accelerate (pip install 'infer[tune]')"
    return None


def new_accelerator(precision: str) -> Any:
    """Return Accelerate's object for this process, as `accelerate launch` configured it.

    Raises `NotUsableError` for a precision that the device doesn't have.
    """
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # An earlier run of this process may have had another precision.
    AcceleratorState._reset_state(reset_partial_state=False)
    try:
        return Accelerator(mixed_precision=AUTOCAST[precision], gradient_accumulation_steps=1)
    except ValueError as error:
        raise NotUsableError(
            f"this device can't train in {precision}: {error}", hint="Use --precision bfloat16 or float32"
        ) from error


def identity(settings: TrainSettings, rows: Rows, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Return digests of what must be equal for a checkpoint to be resumed, by what they are of."""
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
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
