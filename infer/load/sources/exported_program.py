"""Exported programs (.pt2) as modules whose layers can be quantized; read under --trust-code only."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ... import rows
from ...errors import NotUsableError, SourceError
from ...library_errors import first_sentence, quiet
from ...named_inputs import NamedInputs, row_by_row
from ...plan import Plan
from ...spec import DTYPE_NAMES, TensorSpec
from ..loaded_model import LoadedModel
from ..module_copies import own_parameters
from .modules_from_program import restore_layers
from .python_sources import module_in_memory


class KeywordModule(NamedInputs):
    """Adapter that calls a program with positional or keyword arguments by the names of all; where a call of it takes
    `one_row`, row by row.
    """

    def __init__(
        self,
        model: nn.Module,
        positional: tuple[str, ...],
        keyword: tuple[str, ...] = (),
        *,
        one_row: bool = False,
    ) -> None:
        super().__init__()
        self.one_row = one_row
        self.model, self.positional, self.keyword = model, positional, keyword
        self.taking((*positional, *keyword))

    def call(self, tensors: Mapping[str, Tensor]) -> Any:
        return row_by_row(self._outputs, tensors) if self.one_row else self._outputs(tensors)

    def _outputs(self, tensors: Mapping[str, Tensor]) -> Any:
        arguments = [tensors[name] for name in self.positional]
        return self.model(*arguments, **{name: tensors[name] for name in self.keyword})

    def train(self, mode: bool = True) -> KeywordModule:
        """Set the training flag only: the program keeps the mode in which it was captured."""
        self.training = mode
        return self


def load_exported(plan: Plan) -> LoadedModel:
    """Load a `.pt2` program; called under `plan.trust_code` only.

    Names, dtypes and sizes of the inputs come from the program's own signature.
    """
    try:
        with quiet():
            program = torch.export.load(plan.source)
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise SourceError(
            f"torch.export can't read it: {first_sentence(error)}",
            where=plan.source,
            hint=f"Export it again with torch {torch.__version__.partition('+')[0]}, if another version wrote it",
        ) from error
    inputs, sizes = _signature(program, plan)
    loaded = module_in_memory(
        "exported", as_module(program, inputs), lambda: as_module(program, inputs), None
    )
    return replace(loaded, inputs=inputs, sizes=sizes, called=as_module(program, inputs, as_written=True))


def as_module(
    program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...], *, as_written: bool = False
) -> nn.Module:
    """Wrap a program as a module that is called by keyword, with layers that can be quantized unless `as_written`.

    Raises `NotUsableError` for nested inputs.
    """
    args, kwargs = program.call_spec.in_spec.children() if program.call_spec.in_spec else ([], [])
    flat = args.num_leaves == args.num_children and kwargs.num_leaves == kwargs.num_children
    if not flat:
        raise NotUsableError(
            "the program takes nested inputs (lists or dicts of tensors)",
            hint="Export it with one tensor an argument",
        )
    names = tuple(spec.name for spec in inputs)
    module = _without_guards(program) if as_written else with_layers(program)
    one_row = rows.takes_one([spec.shape for spec in inputs])
    return KeywordModule(module, names[: args.num_leaves], tuple(kwargs.context), one_row=one_row)


def _without_guards(program: torch.export.ExportedProgram) -> Any:
    # Guards would forbid sizes of 1 when the program is captured again; sizes are checked by our own specs.
    known = "check_guards" in inspect.signature(program.module).parameters
    return program.module(check_guards=False) if known else program.module()


def with_layers(program: torch.export.ExportedProgram) -> nn.Module:
    """Return the program as a module whose layers can be quantized."""
    module = _without_guards(program)
    own_parameters(module)
    restore_layers(module)
    return module


def _signature(
    program: torch.export.ExportedProgram, plan: Plan
) -> tuple[tuple[TensorSpec, ...], dict[str, tuple[int, int]]]:
    """Return specs of the user's inputs; symbols are named batch (first dimension) or dim1, dim2, … in order."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    symbols: dict[str, str] = {}
    specs = []
    for name in program.graph_signature.user_inputs:
        value = nodes[str(name)].meta["val"] if str(name) in nodes else None
        if not isinstance(value, Tensor):
            raise NotUsableError(f"the program takes {name!r}, which is not a tensor", where=plan.source)
        if value.dtype not in DTYPE_NAMES:
            raise NotUsableError(
                f"input {str(name)!r} of the program is of dtype {str(value.dtype).removeprefix('torch.')}",
                where=plan.source,
                hint=f"Known: {', '.join(DTYPE_NAMES.values())}",
            )
        shape = tuple(_size(size, axis, symbols) for axis, size in enumerate(value.shape))
        specs.append(TensorSpec(str(name), DTYPE_NAMES[value.dtype], shape))
    ranges = {str(symbol): value for symbol, value in program.range_constraints.items()}
    sizes = {}
    for symbol, name in symbols.items():
        low, high = (int(ranges[symbol].lower), ranges[symbol].upper) if symbol in ranges else (1, None)
        cap = plan.max_batch if name == "batch" else plan.max_length
        sizes[name] = (max(low, 1), min(int(high), cap) if high is not None and _finite(high) else cap)
    return tuple(specs), sizes


def _size(size: int | torch.SymInt, axis: int, symbols: dict[str, str]) -> int | str:
    if isinstance(size, int):
        return size
    symbol = str(size)
    if symbol not in symbols:
        symbols[symbol] = (
            "batch" if axis == 0 and "batch" not in symbols.values() else f"dim{len(symbols) + 1}"
        )
    return symbols[symbol]


def _finite(bound: Any) -> bool:
    return str(bound).lstrip("-").isdigit()
