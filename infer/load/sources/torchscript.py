"""TorchScript archives, converted to exported programs; read under --trust-code only."""

from __future__ import annotations

import importlib
import sys
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import rows
from ...errors import NotUsableError, SourceError, UsageError
from ...library_errors import first_sentence, quiet
from ...plan import Plan
from ...spec import Finding, TensorSpec
from ..input_specs import resolve_inputs
from ..loaded_model import LoadedModel
from ..samples.sample_files import specs_of
from .exported_program import KeywordModule, with_layers
from .python_sources import module_in_memory
from .user_module import UserModule

DYNAMIC = 2  # the size given to symbolic dimensions while TorchScript is converted


def load_torchscript(plan: Plan, user_module: UserModule | None) -> LoadedModel:
    """Load TorchScript and convert it to an exported program; called under `plan.trust_code` only."""
    script = _read_script(plan.source)
    names = tuple(argument.name for argument in script.forward.schema.arguments[1:])
    known = user_module.inputs if user_module else ()
    if not known and not plan.inputs and not specs_of(plan.data, names):
        sizes = ", ".join(
            f"{name} {list(value.shape)}" for name, value in list(script.state_dict().items())[:3]
        )
        raise UsageError(
            f"TorchScript does not record the sizes of its inputs; its forward takes {', '.join(names)}",
            where="--input",
            hint=f"First weights: {sizes}. Give --data with an array of each input, or name each, such as "
            + " ".join(f"--input {name}=float32[{_usual_sizes(script)}]" for name in names or ("x",)),
        )
    inputs, proposed = resolve_inputs(plan, known, None, names)
    by_name = {spec.name: spec for spec in inputs}
    if set(by_name) - set(names):
        raise UsageError(
            f"TorchScript's forward takes {', '.join(names)}, got {', '.join(by_name)}", where="--input"
        )
    order = tuple(by_name[name] for name in names if name in by_name)
    program = _convert(script, tuple(_placeholder(spec) for spec in order), plan.source)
    takes = tuple(spec.name for spec in order)
    one_row = rows.takes_one([spec.shape for spec in order])

    def build() -> KeywordModule:
        return KeywordModule(with_layers(program), takes, one_row=one_row)

    loaded = module_in_memory("torchscript", build(), build, user_module)
    why = "TorchScript is deprecated: read and converted, never written"
    converted = Finding("load", "converted", "torch.export", why=why)
    return replace(loaded, inputs=order, called=KeywordModule(script, takes)).saying(*proposed, converted)


def _read_script(source: str) -> Any:
    if sys.version_info >= (3, 14):
        raise NotUsableError(
            "torch does not read TorchScript on Python 3.14 or later",
            hint="Convert it once on Python 3.13 or earlier",
        )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r".*torch\.jit\..*deprecated", category=DeprecationWarning)
        try:
            return torch.jit.load(source, map_location="cpu").eval()
        except RuntimeError as error:
            raise SourceError(f"torch.jit can't read it: {first_sentence(error)}", where=source) from error


def _usual_sizes(script: Any) -> str:
    """Return the sizes of an input that the first weight of several dimensions multiplies."""
    weights = (tuple(value.shape) for value in script.state_dict().values())
    shape = next((shape for shape in weights if len(shape) > 1), (1, 3, 3, 3))
    return ",".join(("batch", str(shape[1]), *(["32"] * (len(shape) - 2))))


def _convert(script: Any, examples: tuple[Tensor, ...], source: str) -> torch.export.ExportedProgram:
    try:
        converter = importlib.import_module("torch._export.converter").TS2EPConverter
    except (ImportError, AttributeError) as error:
        raise NotUsableError(
            f"torch {torch.__version__} has no TorchScript converter any more",
            hint="Save the state dict of the original model and give --model file.py:factory",
        ) from error
    with quiet():
        try:
            return converter(script, examples).convert()
        except Exception as error:
            raise NotUsableError(
                f"this TorchScript can't be converted: {first_sentence(error)}",
                hint=f"Save the state dict of the original of {source} and give --model file.py:factory",
            ) from error


def _placeholder(spec: TensorSpec) -> Tensor:
    """Return zeros of the spec's shape for the conversion, `DYNAMIC` for each symbolic size."""
    return torch.zeros(
        [DYNAMIC if isinstance(size, str) else size for size in spec.shape], dtype=spec.torch_dtype
    )
