"""Python file given by the user: `file.py:factory`, and the optional attributes it may define.

    def build() -> nn.Module: ...
    INPUTS = {"image": "float32[batch,1,8,8]"}
    OUTPUTS = ("logits",)
    TASK = "classification"
    def example_inputs() -> dict[str, Tensor]: ...       real inputs, batch first
    def calibration_inputs() -> dict[str, Tensor]: ...   more of them

It runs because it was named on the command line; nothing in a checkpoint can name it.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...errors import InferError, SourceError, UsageError, unknown
from ...library_errors import describe
from ...spec import TensorSpec

TASKS = ("tensors", "classification", "embedding", "text-generation")


class UserModule:
    """An imported `file.py` and the factory named in it."""

    def __init__(self, text: str) -> None:
        file, _, name = text.rpartition(":")
        if not file.endswith(".py") or not name.isidentifier():
            raise UsageError(f"expected FILE.py:FACTORY, got {text!r}", hint="Example: --model net.py:build")
        self.text, self.path, self.name = text, Path(file), name
        self.module = import_file(self.path)
        if not callable(getattr(self.module, name, None)):
            raise unknown(f"factory in {file}", name, _callables(self.module))

    def build(self) -> Any:
        """Call the factory, with its folder importable as for a script."""
        with importable(self.path.parent):
            return getattr(self.module, self.name)()

    @property
    def inputs(self) -> tuple[TensorSpec, ...]:
        declared = getattr(self.module, "INPUTS", {})
        if not isinstance(declared, Mapping):
            raise self._wrong("INPUTS", "a dict of NAME: 'DTYPE[DIMS]'", declared)
        return tuple(TensorSpec.parse(f"{name}={spec}") for name, spec in declared.items())

    @property
    def outputs(self) -> tuple[str, ...]:
        declared = getattr(self.module, "OUTPUTS", ())
        if isinstance(declared, str) or not all(isinstance(name, str) for name in declared):
            raise self._wrong("OUTPUTS", "a tuple of names", declared)
        return tuple(declared)

    @property
    def task(self) -> str:
        declared = getattr(self.module, "TASK", "tensors")
        if declared not in TASKS:
            raise unknown(f"task (TASK in {self.path})", str(declared), TASKS)
        return str(declared)

    def tensors(self, function: str) -> dict[str, Tensor] | None:
        """Call `example_inputs()` or `calibration_inputs()`; None when the file has no such function."""
        call = getattr(self.module, function, None)
        return None if call is None else call_for_tensors(call, f"{self.path}:{function}")

    def _wrong(self, name: str, expected: str, got: Any) -> SourceError:
        return SourceError(f"expected {name} to be {expected}, got {str(got)[:80]!r}", where=str(self.path))


def call_for_tensors(call: Callable[[], Any], where: str) -> dict[str, Tensor]:
    """Call a user function that returns tensors by name; raise `SourceError` for anything else."""
    with user_code_errors(where):
        tensors = call()
    if isinstance(tensors, Mapping) and all(isinstance(name, str) for name in tensors):
        return {name: torch.as_tensor(value) for name, value in tensors.items()}
    raise SourceError(f"expected a dict of tensors by input name, got {type(tensors).__name__}", where=where)


def import_file(path: Path) -> ModuleType:
    """Import a Python file as a module of its own."""
    if not path.is_file():
        raise UsageError(f"no file {path}", hint="Give the path of the Python file that builds the model")
    name = f"infer_recipe_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise SourceError("expected a Python file", where=str(path))
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up by name.
    sys.modules[name] = module
    with importable(path.parent), user_code_errors(str(path)):
        spec.loader.exec_module(module)
    return module


@contextmanager
def user_code_errors(where: str) -> Iterator[None]:
    """Convert exceptions of the user's own code to `SourceError`."""
    try:
        yield
    except InferError:
        raise
    except Exception as error:
        raise SourceError(
            f"{where} raised {describe(error)}",
            where=where,
            hint="Run it alone to see the traceback",
        ) from error


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Put the folder first on `sys.path`, as Python does for a script."""
    entry = str(folder.resolve())
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        if entry in sys.path:
            sys.path.remove(entry)


def _callables(module: ModuleType) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]
