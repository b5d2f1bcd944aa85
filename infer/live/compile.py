"""`infer.compile`: a module of the user's program, made smaller and faster, checked, and callable as before."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from .. import fidelity
from ..artifact.artifact_cache import cached_artifact
from ..artifact.manifest import REPORT
from ..errors import GateError, InferError, NotUsableError, UsageError
from ..fidelity.thresholds import limits
from ..load.module_copies import copy_structure
from ..options import fields, from_values
from ..plan import IN_MEMORY, Plan
from ..predict.predictor import Predictor
from ..report import document
from ..report.rendering.progress import progress_bars
from ..reporter import Reporter
from ..run import stages
from .call_structure import CallReader, Structure, UnsupportedValueError, take_apart
from .compiled_model import CompiledModel, Variant, numbered
from .given_calls import Call, given_calls
from .live_source import LiveSource, live_source, without_calls

MOST_VARIANTS = 4  # structures of calls; the original computes the others
MOST_CHECKED = 16  # calls of a structure, once the artifact is open


def compile(
    model: nn.Module,
    data: Any = None,
    *,
    output: str | Path | None = None,
    select: Callable[[Any], Any] | None = None,
    replace: bool = False,
    reporter: Reporter | None = None,
    **options: Any,
) -> CompiledModel:
    """Return a smaller, faster callable that takes and returns what `model` does, checked against it.

        fast = infer.compile(model, data=loader, quant="int8")
        fast(x, mask=m)

    - `data`: calls of the model. A tensor is one call, a tuple its positional arguments, a dict its named ones; a list,
      a loader, a dataset or a generator has a call in each item, `infer.record` has those of a running program. Without
      it inputs of ours check the result, where the layers tell what the model takes.
    - `select`: takes from an item what the model takes, such as `lambda row: row[0]`.
    - `output`: the artifact to write, which `replace` overwrites; by default it is in the user's cache, where a second
      start with the same weights, code, data and options finds it.
    - `reporter`: receives progress and findings; by default a terminal and a notebook show bars.
    - `options`: those of `infer optimize`, by the names of `infer.Plan`: `quant`, `backend`, `max_error`, `threads`, …

    The model keeps its weights, device, dtype and mode. Sizes that vary over the calls may vary within what was seen;
    for calls beyond that, with other constants or with gradients the model itself runs, and `misses` counts it.

    Raises what `infer.optimize` does: `GateError` where the result is less faithful than the limits of its precision
    class, or no gain; `NotUsableError` where the model can't be captured; `UsageError` for data that it does not take.
    """
    with torch.inference_mode(False), _shown(reporter) as shown, _hints_in_python():
        return _compile(model, data, output, select, replace, shown, options)


@contextmanager
def _hints_in_python() -> Iterator[None]:
    """Write the options that errors name as arguments: `--max-error` becomes `max_error`."""
    try:
        yield
    except InferError as error:
        error.message, error.hint = in_python(error.message), in_python(error.hint)
        error.where = in_python(error.where)
        raise


def in_python(text: str) -> str:
    """Return a sentence with the arguments of `infer.compile` in place of the flags of `infer optimize`."""
    known = {
        field.flag: f"{field.name}={not field.default}" if field.type is bool else field.name
        for field in fields(Plan)
    }
    return re.sub(r"--[a-z][a-z-]*", lambda flag: known.get(flag[0], flag[0]), text)


@contextmanager
def _shown(reporter: Reporter | None) -> Iterator[Reporter]:
    """Yield the reporter given; else bars on a terminal and in a notebook, and nothing in a log."""
    console = Console(stderr=True)
    if reporter is not None or not (console.is_terminal or console.is_jupyter):
        yield reporter or Reporter()
    else:
        with progress_bars(console) as bars:
            yield bars


def _compile(
    model: nn.Module,
    data: Any,
    output: str | Path | None,
    select: Callable[[Any], Any] | None,
    replace: bool,
    reporter: Reporter,
    options: dict[str, Any],
) -> CompiledModel:
    original = own_module(model)
    evaluated = _in_evaluation(original)
    plan = plan_of(original, options)
    variants: list[Variant] = []
    grouped = _by_structure(evaluated, plan, data, select)
    for number, (structure, calls, origin) in enumerate(grouped):
        source = live_source(evaluated, plan, structure, calls, origin)
        place = None if output is None else numbered(Path(output), number)
        variants.append(_variant(source, plan, place, replace, reporter))
    return CompiledModel(original, evaluated, variants)


def own_module(model: Any) -> nn.Module:
    """Return the module that a user wrote, out of the wrappers of torch.compile and DataParallel; or `UsageError`."""
    while isinstance(model, nn.DataParallel) or hasattr(model, "_orig_mod"):
        model = model.module if isinstance(model, nn.DataParallel) else model._orig_mod
    if isinstance(model, CompiledModel):
        model = model.original
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError(
            "the model is a TorchScript module, whose forward has no names",
            hint="model.save('model.pt'), then infer optimize model.pt --trust-code",
        )
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected an nn.Module, got {type(model).__name__}",
            hint="Files and names: infer.optimize(source, output)",
        )
    return model


def plan_of(module: nn.Module, options: dict[str, Any]) -> Plan:
    """Return the plan of a module in memory: the options given, on the module's own device by default."""
    devices = {parameter.device for parameter in itertools.chain(module.parameters(), module.buffers())}
    if len(devices) > 1:
        names = ", ".join(sorted(map(str, devices)))
        raise NotUsableError(f"the model lies on several devices: {names}", hint="Move it to one of them")
    device = str(next(iter(devices), torch.device("cpu")))
    if device == "meta":
        raise UsageError("the model has no weights: it is on the meta device", hint="Load them first")
    source = f"{IN_MEMORY}{type(module).__name__}"
    return from_values(Plan, {"device": device, **options, "source": source}, where="infer.compile")


def _in_evaluation(module: nn.Module) -> nn.Module:
    """Return the module, or where a layer is in training mode a copy in evaluation mode that shares the weights."""
    return copy_structure(module).eval() if any(layer.training for layer in module.modules()) else module


def _by_structure(
    module: nn.Module, plan: Plan, data: Any, select: Callable[[Any], Any] | None
) -> list[tuple[Structure, list[list[Tensor]], str]]:
    """Return the structures of the calls, those with the most calls first, and the tensors of each call."""
    if data is None:
        return [(*without_calls(module, plan), "")]
    calls = data if isinstance(data, list) and all(isinstance(item, Call) for item in data) else None
    origin = "calls of the running program" if calls is not None else "data"
    reader = CallReader(module)
    groups: dict[Hashable, tuple[Structure, list[list[Tensor]]]] = {}
    for call in calls if calls is not None else given_calls(module, data, select):
        try:
            structure, tensors = reader.read(call.args, call.kwargs)
        except UnsupportedValueError as error:
            raise UsageError(
                f"{type(module).__name__}: {error.message}", where="data", hint="Leave it out of the calls"
            ) from error
        if not tensors:
            raise UsageError("a call has no tensor", where="data")
        kinds = tuple((tensor.dtype, tensor.dim()) for tensor in tensors)
        groups.setdefault((structure.key, kinds), (structure, []))[1].append([t.detach() for t in tensors])
    if not groups:
        raise UsageError(
            "no call of the model was recorded", where="data", hint="Run the program inside infer.record"
        )
    most = sorted(groups.values(), key=lambda group: -len(group[1]))[:MOST_VARIANTS]
    return [(structure, tensors, origin) for structure, tensors in most]


def _variant(
    source: LiveSource, plan: Plan, output: Path | None, replace: bool, reporter: Reporter
) -> Variant:
    """Make or find the artifact of one structure, and check it on calls of its user."""
    made: list[Path] = []

    def make(place: Path, *, again: bool = replace) -> None:
        stages.optimize(plan, place, reporter=reporter, replace=again, in_memory=source.loaded)
        made.append(place)

    if output is None:
        place = cached_artifact(plan, source.digest, source.name, make, reporter)
    else:
        make(place := output)
    variant = _opened(source, place)
    reason = _difference(source, variant)
    if reason and not made:  # code that no digest sees computes something else than when it was made
        variant.predictor.close()
        make(place, again=True)
        variant = _opened(source, place)
        reason = _difference(source, variant)
    if reason:
        variant.predictor.close()
        raise GateError(reason, hint="Give data=... with calls of every kind that the program makes")
    return variant


def _opened(source: LiveSource, place: Path) -> Variant:
    predictor = Predictor.load(place)  # signed by this user, who made it
    report = document.decode((place / REPORT).read_bytes())
    return Variant(source.structure, source.returned, source.output_dtypes, predictor, report)


def _difference(source: LiveSource, variant: Variant) -> str | None:
    """Return in which way the variant differs from the module on a call; None where it agrees within the limits."""
    reader, names = CallReader(source.module), source.structure.names
    outputs = [spec.name for spec in variant.predictor.outputs]
    plan = variant.predictor.manifest.plan
    calls = source.calls[:: -(-len(source.calls) // MOST_CHECKED) or 1]
    for call in calls:
        positional, named = reader.arguments(source.structure, call)
        with torch.no_grad():
            structure, expected = take_apart(source.float_module(*positional, **named), "output")
        if structure.key != source.returned.key:
            return "the model returns another number of outputs, or other constants, from call to call"
        inputs = dict(zip(names, call, strict=True))
        got = variant.predictor.run_fitting(inputs)
        if got is None:
            shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in inputs.items())
            taken = ", ".join(map(str, variant.predictor.inputs))
            return f"the artifact does not take a call of the data: {shapes}; it takes {taken}"
        metrics = fidelity.compare(dict(zip(outputs, expected, strict=True)), got, task="tensors")
        if reason := fidelity.judge(metrics, limits(plan, "tensors"), plan.max_error):
            return f"{reason}, on a call of the data"
    return None
