"""Capture with narrower or fixed sizes, of models that can't be captured with the symbolic ones asked for.

The exporter refuses a symbolic size whose bounds are wider than what the model's code takes: such a model is captured
again within the bounds that it names. It also refuses one that the code turns into a constant: captured again with the
batch fixed at 1, with the lengths fixed as in the samples, with both; the first that works is taken. Where each
row's output depends on that row alone, which is tried on the model itself, a batch of 1 still serves any number of
rows: they run one after the other.

A graph that gives other numbers than its module at a size is no capture of it: it is captured again without that size,
or as if it were not being captured.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotUsableError
from ..library_errors import first_sentence, quiet
from ..rows import cut, have_rows, lie_first, without
from ..spec import BATCH, TensorSpec
from . import row_independence
from .agreement import Disagreement, buffers_kept, clones, disagreement, require_comparable
from .capture import capture, check_input_names, specialized
from .program import TorchGraph, flatten

MOST_ROWS = 65  # tried together, at least
MOST_STEPS = 4  # captures with multiples that the exporter names one after another
MOST = 4096  # of a size without bounds
_MULTIPLE = re.compile(r"^\s*\w+ = (\d+)\*_(\w+)$", re.M)
TOKENS = 64  # of each row of a language model, that show whether it can be compared at all
Sizes = Mapping[str, tuple[int, int]]
_GUARD = re.compile(
    r"Not all values of (\w+) = (\S+\.size\(\)\[\d+\]) in the specified range .*? satisfy the generated guard "
    r"(.*?)\.?(?:Specializations unexpectedly.*)?$",
    re.MULTILINE,
)
_FORMULA = re.compile(r"(?:[v\d\s()+\-*/%<>=!]|\band\b)+")


def capture_at_any_sizes(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    samples: Mapping[str, Tensor],
    *,
    sizes: Sizes,
    outputs: tuple[str, ...] = (),
    task: str = "tensors",
    called: nn.Module | None = None,
    multiples: Mapping[str, int] | None = None,
) -> TorchGraph:
    """Capture with the symbolic sizes that `inputs` name, fixing as few of them as the model requires; the graph's
    `fixed` says which.

    `called`: what the user calls, where `module` was made of it. The graph's `inputs` have a number in place of "batch"
    where the rows of a batch depend on each other. Raises as `capture` does, with the sizes that must be given as
    numbers and the line of the model's code in the sentence.
    """
    check_input_names(called or module, inputs)
    source = _Source(module, called or module, inputs, samples, outputs, task, multiples or {})
    if not source.takes_rows(sizes):
        inputs = without(inputs)
        source = replace(source, inputs=inputs)
        sizes = {name: bounds for name, bounds in sizes.items() if name != BATCH}
    require_comparable_calls(source.called, inputs, samples, sizes, task)
    try:
        return _with_rows(source.called, source.agreeing(sizes), sizes)
    except NotUsableError as error:
        if error.__cause__ is None:
            raise
        refusal, reason = error, error.__cause__
    if graph_in_steps := _in_steps(source, sizes, reason):
        return graph_in_steps
    for fixed in _sizes_to_fix(reason, inputs, samples, sizes):
        asserts = any(low < high for low, high in fixed.values())
        try:
            graph = source.agreeing({**sizes, **fixed}, asserts=asserts)
        except NotUsableError as error:
            if error.__cause__ is None:
                raise
            continue
        if fixed.get(BATCH, (1, 1)) != (1, 1) and not _rows_are_independent(source.called, graph, sizes):
            continue  # more rows than these are another model to its code
        graph = _with_rows(source.called, graph, sizes)
        if (
            isinstance(reason, _OtherNumbersError)
            and graph.sizes.get(BATCH, (0, 1)) == (0, 1)
            and BATCH in fixed
        ):
            break  # one row a request is not what was asked for
        if asserts:
            named = ", ".join(
                f"{name} {low} to {high}" if low < high else f"{name} {low}"
                for name, (low, high) in fixed.items()
            )
            return replace(graph, fixed=f"narrower sizes: {named} (the model's code takes no others)")
        named = ", ".join(f"{name} {size}" for name, (size, _) in fixed.items())
        rows = ""
        if BATCH in fixed:
            several = have_rows(graph.inputs)
            rows = "; rows run one by one" if several else "; it takes one row a request"
        return replace(graph, fixed=f"fixed sizes: {named} ({_fixing_reason(reason, fixed)}{rows})")
    raise refusal


def require_comparable_calls(
    called: nn.Module,
    inputs: tuple[TensorSpec, ...],
    samples: Mapping[str, Tensor],
    sizes: Sizes,
    task: str,
) -> None:
    """Raise `SourceError` where two calls of the user's module differ, one fails or gives no finite value; see
    `require_comparable`. Few rows and tokens are tried.
    """
    require_comparable(lambda given: _first_call(called, given), _few_rows(inputs, samples, sizes, task))


def _first_call(called: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the outputs of a call that leaves no trace in the buffers."""
    with buffers_kept(called):
        return flatten(called(**inputs))


class _OtherNumbersError(Exception):
    """The captured graph gives other numbers than its module, where `found` says."""

    def __init__(self, found: Disagreement) -> None:
        super().__init__(found.text)
        self.found = found


@dataclass(frozen=True)
class _Source:
    """Module to capture, and the one that its user calls."""

    module: nn.Module
    called: nn.Module
    inputs: tuple[TensorSpec, ...]
    samples: Mapping[str, Tensor]
    outputs: tuple[str, ...]
    task: str
    multiples: Mapping[str, int]

    def takes_rows(self, sizes: Sizes) -> bool:
        """Return false for a model with inputs that belong to no row, which fails on fewer rows of the others: the
        nodes of a graph, say.
        """
        if not have_rows(self.inputs) or all(spec.batched for spec in self.inputs):
            return True
        with quiet(), torch.no_grad():
            try:
                _first_call(self.called, _few_rows(self.inputs, self.samples, sizes, self.task))
            except Exception:  # noqa: BLE001 - whatever the model raises, it may take the whole
                try:
                    _first_call(self.called, self.samples)
                except Exception:  # noqa: BLE001 - then the sizes are not why
                    return True
                return False
        return True

    def agreeing(self, sizes: Sizes, *, asserts: bool = False) -> TorchGraph:
        """Capture a graph that gives the numbers that its user sees.

        Raises `NotUsableError` as `capture` does, and for a graph that gives others. Graphs of language models are
        compared later, on whole windows, but for those whose guards are checked at each call.
        """
        graph = self._capture(sizes, asserts=asserts)
        later = self.task == "text-generation" and not asserts
        difference = None if later else disagreement(self.called, graph)
        if difference is not None and not difference.size:
            with contextlib.suppress(NotUsableError), _as_if_called(self.module):
                graph = self._capture(sizes, asserts=asserts)
                difference = disagreement(self.called, graph)
        if difference is None:
            return graph
        where = f" at {difference.size} {difference.value}" if difference.size else ""
        raise NotUsableError(
            f"the captured model gives other numbers than its own code{where}: {difference.text}",
            hint="Its code takes another path while it is captured, or by the size of its inputs: write one path for "
            f"all, or give the sizes that it is used with as numbers: {_as_numbers(graph)}",
        ) from _OtherNumbersError(difference)

    def _capture(self, sizes: Sizes, *, asserts: bool) -> TorchGraph:
        return capture(
            self.module,
            self.inputs,
            self.samples,
            sizes=sizes,
            outputs=self.outputs,
            task=self.task,
            multiples=self.multiples,
            asserts=asserts,
        )


def _in_steps(source: _Source, sizes: Sizes, reason: BaseException) -> TorchGraph | None:
    """Capture with sizes that are multiples of what the exporter says, from the second on where it refuses the first.

    None where it says nothing, or that fails.
    """
    named = {size for spec in source.inputs for size in spec.shape}
    steps, bounds = dict(source.multiples), dict(sizes)
    for _ in range(MOST_STEPS):
        more = {name: int(step) for step, name in _MULTIPLE.findall(str(reason)) if name in named}
        if isinstance(reason, _OtherNumbersError):
            size, step = reason.found.size, steps.get(reason.found.size, 1)
            if step == 1 or reason.found.value > step:
                return None
            bounds[size] = (2 * step, bounds.get(size, (1, 4096))[1])
        elif more.items() <= steps.items():
            return None
        steps |= more
        try:
            graph = replace(source, multiples=steps).agreeing(bounds)
        except NotUsableError as error:
            if error.__cause__ is None:
                raise
            reason = error.__cause__
            continue
        each = ", ".join(f"{name} in multiples of {step}" for name, step in steps.items())
        graph = _with_rows(source.called, graph, sizes)
        return replace(graph, fixed=f"sizes: {each} (the model's code takes no others)")
    return None


def _as_numbers(graph: TorchGraph) -> str:
    """Write `--input` options with a number for each size: one row, lengths as in the samples."""
    each = []
    for spec in graph.inputs:
        have = graph.samples[spec.name].shape
        sizes = [1 if size == BATCH else count for size, count in zip(spec.shape, have, strict=True)]
        each.append(f"--input {spec.name}={spec.dtype}[{','.join(map(str, sizes))}]")
    return " ".join(each)


def _few_rows(
    inputs: tuple[TensorSpec, ...], samples: Mapping[str, Tensor], sizes: Sizes, task: str
) -> dict[str, Tensor]:
    """Return two rows of the samples, the fewest that the model takes if more; few tokens of a language model."""
    rows = max(2, sizes.get(BATCH, (1, 1))[0])
    few = cut(inputs, samples, 0, rows)
    if task != "text-generation":
        return few
    tokens = {spec.name: spec.shape.index("seq") for spec in inputs if "seq" in spec.shape}
    return {
        name: value.narrow(tokens[name], 0, min(TOKENS, value.shape[tokens[name]]))
        if name in tokens
        else value
        for name, value in few.items()
    }


def _sizes_to_fix(
    cause: BaseException, inputs: tuple[TensorSpec, ...], samples: Mapping[str, Tensor], sizes: Sizes
) -> Iterator[dict[str, tuple[int, int]]]:
    """Yield the sizes to limit: within the bounds that the exporter names; then, fixed, those it names, the batch, the
    lengths, all. Of a graph that gives other numbers at one size only that one.
    """
    reason = str(cause)
    free = {size: (1, MOST) for spec in inputs for size in spec.shape if isinstance(size, str)} | dict(sizes)
    seen = {size: n for spec in inputs for size, n in zip(spec.shape, samples[spec.name].shape, strict=True)}
    if narrow := _narrower(reason, free, seen):
        yield narrow
    fixed: dict[str, int] = {}
    for spec in inputs:
        for size, have in zip(spec.shape, samples[spec.name].shape, strict=True):
            if isinstance(size, str) and sizes.get(size, (1, 2))[0] < sizes.get(size, (1, 2))[1]:
                fixed.setdefault(size, 1 if size == BATCH else have)
    named = specialized(reason)
    tried: list[set[str]] = []
    groups = [named, [BATCH], [name for name in fixed if name != BATCH], list(fixed)]
    if isinstance(cause, _OtherNumbersError):
        size, value = cause.found.size, cause.found.value
        if size not in fixed:
            return
        low, high = sizes.get(size, (1, 1))
        if size != BATCH and value == low and low + 1 < high:
            yield {size: (low + 1, high)}
        groups = [[size]]
    for group in groups:
        names = {name for name in group if name in fixed}
        if names and names not in tried:
            tried.append(names)
            yield {name: (fixed[name], fixed[name]) for name in fixed if name in names}


def _narrower(reason: str, sizes: Sizes, samples: Mapping[Any, int]) -> dict[str, tuple[int, int]]:
    """Return the bounds that the exporter's guards leave to sizes, empty where it calls any a constant.

    A guard is a formula of one size, such as (height // 8) == 1; what satisfies all of a size, around that of the
    samples, is kept. Of the batch only the largest may be narrowed: else it is left to the capture of one row.
    """
    if "specialized it to be a constant" in reason:
        return {}
    guards: dict[str, list[str]] = {}
    for name, size, guard in _GUARD.findall(reason):
        if name not in sizes:
            return {}
        formula = guard.replace(size, "v")
        if _FORMULA.fullmatch(formula) and "**" not in formula:
            guards.setdefault(name, []).append(formula)
    runs = {}
    for name, every in guards.items():
        low, high = sizes[name]
        if name == BATCH:  # guards of exporters begin at 2, and a graph for 2 rows and more takes one
            first, last = _run_around(2, every, 2, high)
            if first != 2 or last == 2 or low > 2:
                return {}
            runs[name] = low, last
        else:
            runs[name] = _run_around(samples[name], every, low, high)
    return {name: bounds for name, bounds in runs.items() if sizes[name] != bounds and bounds[0] < bounds[1]}


def _run_around(have: int, guards: list[str], low: int, high: int) -> tuple[int, int]:
    """Return the ends of the run of numbers around `have` that satisfy all guards."""
    compiled = [compile(guard, "guard", "eval") for guard in dict.fromkeys(guards)]

    def holds(value: int) -> bool:
        try:
            return all(eval(guard, {"__builtins__": {}}, {"v": value}) for guard in compiled)  # noqa: S307 - of _FORMULA
        except ZeroDivisionError:
            return False

    first, last = have, have
    while first > low and holds(first - 1):
        first -= 1
    while last < high and holds(last + 1):
        last += 1
    return first, last


def _fixing_reason(cause: BaseException, fixed: Sizes) -> str:
    reason = str(cause)
    if isinstance(cause, _OtherNumbersError):
        difference = cause.found
        place = f"{difference.size} {difference.value}"
        return f"the graph gives other numbers than the model's code at {place}: {difference.text}"
    named = [name for name in specialized(reason) if name in fixed]
    if named:
        return f"the model's code makes a constant of {' and '.join(named)}"
    return f"the exporter can't vary it: {first_sentence(cause).rstrip('.')}"


def _with_rows(module: nn.Module, graph: TorchGraph, sizes: Sizes) -> TorchGraph:
    """Name the first size of the outputs of a graph with a batch of 1, or give the batch as a number.

    The name promises that rows are independent. A graph with any other batch is returned as it is.
    """
    if graph.sizes.get(BATCH) != (1, 1):
        return graph
    if _is_one_row(graph) and _rows_are_independent(module, graph, sizes):
        return with_named_rows(graph)
    inputs = tuple(_with_row_count(spec, 1) for spec in graph.inputs)
    samples = cut(graph.inputs, graph.samples, 0, 1)
    sizes = {name: size for name, size in graph.sizes.items() if name != BATCH}
    return replace(graph, inputs=inputs, samples=samples, sizes=sizes)


def with_named_rows(graph: TorchGraph) -> TorchGraph:
    """Rename the first size of the outputs "batch" where inputs have a batch of 1 and rows are independent."""
    if not _is_one_row(graph):
        return graph
    return replace(graph, outputs=tuple(_with_row_count(spec, BATCH) for spec in graph.outputs))


def _is_one_row(graph: TorchGraph) -> bool:
    return graph.sizes.get(BATCH) == (1, 1) and lie_first(graph.inputs)


def _with_row_count(spec: TensorSpec, rows: int | str) -> TensorSpec:
    shape = (
        (rows, *spec.shape[1:]) if rows == BATCH else [rows if size == BATCH else size for size in spec.shape]
    )
    return TensorSpec(spec.name, spec.dtype, tuple(shape))


def _rows_are_independent(module: nn.Module, graph: TorchGraph, sizes: Sizes) -> bool:
    """Return true if the model gives the same rows for several inputs at once as for each alone, up to the largest
    batch that was asked for.
    """
    if not all(spec.shape and spec.shape[0] in (1, BATCH) for spec in graph.outputs):
        return False
    asked = sizes.get(BATCH, (1, 1))[1]
    most = max(asked, MOST_ROWS) if asked > 1 else 2  # of a model that is called with one row two tell enough
    named = with_named_rows(graph)

    def run(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        outputs = flatten(module(**clones(inputs)))
        return {spec.name: value for spec, value in zip(named.outputs, outputs, strict=True)}

    with buffers_kept(module), quiet(), torch.no_grad():
        joining = row_independence.joining(
            run, graph.inputs, named.outputs, graph.samples, {BATCH: (1, most)}
        )
    return joining.joins != "none"


@contextlib.contextmanager
def _as_if_called(module: nn.Module) -> Iterator[None]:
    """Let the code of `module` that asks whether it is being compiled or exported hear that it is not."""
    flags = ("_is_compiling_flag", "_is_exporting_flag")
    held: list[dict[str, bool]] = []

    def enter(*_: Any) -> None:
        held.append({flag: getattr(torch.compiler, flag) for flag in flags if hasattr(torch.compiler, flag)})
        for flag in held[-1]:
            setattr(torch.compiler, flag, False)

    def leave(*_: Any) -> None:
        for flag, value in held.pop().items():
            setattr(torch.compiler, flag, value)

    handles = [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
