"""Sources that run code: the user's own function; with `--trust-code` pickles, TorchScript and `.pt2`."""

from __future__ import annotations

import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotUsableError, SourceError, UsageError
from ..plan import Plan
from ..silence_logs import quiet
from ..spec import DTYPE_NAMES, Finding, TensorSpec
from . import data
from .copies import copy_structure, own_parameters
from .input_specs import resolve_inputs
from .layer_recovery import restore_layers
from .loaded_model import LoadedModel
from .user_module import UserModule, user_code_errors

DYNAMIC = 2  # the size given to symbolic dimensions while TorchScript is converted


class KeywordModule(nn.Module):
    """Adapter that calls a program with positional or keyword arguments by keyword only."""

    def __init__(self, model: nn.Module, positional: tuple[str, ...], keyword: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.model = model

        def forward(**inputs: Tensor) -> Any:
            given = [inputs[name] for name in positional]
            return self.model(*given, **{name: inputs[name] for name in keyword})

        kind = inspect.Parameter.KEYWORD_ONLY
        signature = inspect.Signature([inspect.Parameter(name, kind) for name in (*positional, *keyword)])
        forward.__signature__ = signature  # type: ignore[attr-defined]
        self.forward = forward

    def train(self, mode: bool = True) -> KeywordModule:
        """Keep the mode in which the program was captured; only the flag changes."""
        self.training = mode
        return self


def load_user_module(plan: Plan) -> tuple[LoadedModel, UserModule]:
    """Load `file.py:factory` as the source; the module brings its own weights."""
    user_module = UserModule(plan.source)

    def build() -> nn.Module:
        with user_code_errors(user_module.text):
            module = user_module.build()
        if not isinstance(module, nn.Module):
            raise SourceError(
                f"expected {user_module.text} to return an nn.Module, got {type(module).__name__}",
                where="--model",
            )
        return module.eval()

    return _in_memory("module", build(), build, user_module), user_module


def load_pickled(plan: Plan, user_module: UserModule | None) -> LoadedModel:
    """Load a pickled nn.Module; called under `plan.trust_code` only."""
    try:
        found = torch.load(plan.source, map_location="cpu", weights_only=False)
    except (AttributeError, ModuleNotFoundError) as error:
        raise SourceError(
            f"the pickled model names code that is not here: {error}",
            where=plan.source,
            hint="Run where it can be imported, or save model.state_dict() and give --model file.py:factory",
        ) from error
    found, note = _module_in(found, plan)
    module = found.float().eval()
    untouched = copy_structure(module)
    loaded = _in_memory("module", module, lambda: copy_structure(untouched), user_module)
    loaded.findings += [Finding("load", "checkpoint", note)] if note else []
    return loaded


def _module_in(found: Any, plan: Plan) -> tuple[nn.Module, str]:
    """Return the pickled module, which may be one value of a mapping, and what was left beside it."""
    if isinstance(found, nn.Module):
        return found, ""
    values = found if isinstance(found, Mapping) else {}
    modules = [str(name) for name, value in values.items() if isinstance(value, nn.Module)]
    if plan.key and plan.key not in modules:
        raise UsageError(
            f"the file has no module {plan.key!r}",
            where="--key",
            hint=f"Modules: {', '.join(modules) or 'none'}",
        )
    if plan.key or len(modules) == 1:
        name = plan.key or modules[0]
        others = ", ".join(str(other) for other in list(values)[:7] if other != name)
        return values[name], f"took {name!r}" + (f", left {others}" if others else "")
    if modules:
        raise SourceError(
            f"expected one pickled nn.Module, got {len(modules)}: {', '.join(modules)}",
            where=plan.source,
            hint=f"Name the one to take: --key {modules[0]}",
        )
    held = f"a mapping of {', '.join(map(str, list(values)[:6]))}" if values else type(found).__name__
    raise SourceError(
        f"expected a pickled nn.Module, got {held}",
        where=plan.source,
        hint="Save the state dict in it on its own and give --model file.py:factory",
    )


def load_exported(plan: Plan) -> LoadedModel:
    """Load a `.pt2` program; called under `plan.trust_code` only.

    Names, dtypes and sizes of the inputs come from the program's own signature.
    """
    try:
        with quiet():
            program = torch.export.load(plan.source)
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        text = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise SourceError(f"torch.export can't read it: {text}", where=plan.source) from error
    inputs, sizes = _signature(program, plan)
    loaded = _in_memory("exported", as_module(program, inputs), lambda: as_module(program, inputs), None)
    loaded.inputs, loaded.sizes = inputs, sizes
    return loaded


def load_torchscript(plan: Plan, user_module: UserModule | None) -> LoadedModel:
    """Load TorchScript and convert it to an exported program; called under `plan.trust_code` only."""
    script = _read_script(plan.source)
    names = tuple(argument.name for argument in script.forward.schema.arguments[1:])
    known = user_module.inputs if user_module else ()
    from_data = () if known or plan.inputs else data.specs_of(plan.data, names)
    known = known or from_data
    if not known and not plan.inputs:
        sizes = ", ".join(
            f"{name} {list(value.shape)}" for name, value in list(script.state_dict().items())[:3]
        )
        raise UsageError(
            f"TorchScript does not tell its inputs' sizes; its forward takes {', '.join(names)}",
            where="--input",
            hint=f"First weights: {sizes}. Give --data with an array of each input, or name it: "
            f"--input {(*names, 'x')[0]}=float32[batch,3,224,224]",
        )
    inputs, _ = resolve_inputs(plan, known, None)
    by_name = {spec.name: spec for spec in inputs}
    if set(by_name) - set(names):
        raise UsageError(
            f"TorchScript's forward takes {', '.join(names)}, got {', '.join(by_name)}", where="--input"
        )
    order = tuple(by_name[name] for name in names if name in by_name)
    program = _convert(script, tuple(_placeholder(spec) for spec in order), plan.source)
    takes = tuple(spec.name for spec in order)
    loaded = _in_memory(
        "torchscript",
        KeywordModule(_without_guards(program), takes),
        lambda: KeywordModule(_without_guards(program), takes),
        user_module,
    )
    loaded.inputs = order
    for spec in from_data:
        why = f"from the array in {plan.data}; --input overrides it"
        loaded.findings.append(Finding("load", "input proposed", spec.format(), why=why))
    why = "TorchScript is deprecated: read and converted, never written"
    loaded.findings.append(Finding("load", "converted", "torch.export", why=why))
    return loaded


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
            raise SourceError(
                f"torch.jit can't read it: {str(error).splitlines()[0][:200]}", where=source
            ) from error


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
            text = str(error).strip().splitlines()
            raise NotUsableError(
                f"this TorchScript can't be converted: {text[0][:200] if text else type(error).__name__}",
                hint=f"Save the state dict of the original of {source} and give --model file.py:factory",
            ) from error


def _placeholder(spec: TensorSpec) -> Tensor:
    """Return zeros of the spec's shape for the conversion, `DYNAMIC` for each symbolic size."""
    return torch.zeros(
        [DYNAMIC if isinstance(size, str) else size for size in spec.shape], dtype=spec.torch_dtype
    )


def as_module(program: torch.export.ExportedProgram, inputs: tuple[TensorSpec, ...]) -> nn.Module:
    """Wrap a program as a module that is called by keyword; raise `NotUsableError` for nested inputs."""
    args, kwargs = program.call_spec.in_spec.children() if program.call_spec.in_spec else ([], [])
    flat = args.num_leaves == args.num_children and kwargs.num_leaves == kwargs.num_children
    if not flat:
        raise NotUsableError(
            "the program takes nested inputs (lists or dicts of tensors)",
            hint="Export it with one tensor an argument",
        )
    names = tuple(spec.name for spec in inputs)
    return KeywordModule(_without_guards(program), names[: args.num_leaves], tuple(kwargs.context))


def _without_guards(program: torch.export.ExportedProgram) -> nn.Module:
    """Return the program as a module whose layers can be quantized."""
    # Guards would forbid sizes of 1 when the program is captured again; sizes are checked by our own specs.
    known = "check_guards" in inspect.signature(program.module).parameters
    module = program.module(check_guards=False) if known else program.module()
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


def _in_memory(
    kind: str, module: nn.Module, rebuild: Callable[[], nn.Module], user_module: UserModule | None
) -> LoadedModel:
    return LoadedModel(
        rebuild=rebuild,
        kind=kind,
        module=module,
        reader=None,
        inputs=user_module.inputs if user_module else (),
        samples={},
        samples_from="",
        outputs=user_module.outputs if user_module else (),
        task=user_module.task if user_module else "tensors",
    )
