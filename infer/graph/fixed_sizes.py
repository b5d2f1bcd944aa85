"""Capture with narrower or fixed sizes, of models that can't be captured with the symbolic ones asked for.

The exporter refuses a symbolic size whose bounds are wider than what the model's code takes: such a model is captured
again within the bounds that it names. It also refuses one that the code turns into a constant: captured again with the
batch fixed at 1, with the lengths fixed as in the samples, with both; the first that works is taken. Where each
row's output depends on that row alone, which is tried on the model itself, a batch of 1 still serves any number of
rows: they run one after the other.

A graph that gives other numbers than its module at a size is no capture of it: it is captured again without that size,
or as if it were not being captured (`called_paths`).
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import NotUsableError
from ..library_errors import first_sentence
from ..silence_logs import quiet
from ..spec import BATCH, TensorSpec
from .agreement import Disagreement, buffers_kept, disagreement, require_comparable
from .called_paths import as_if_called
from .capture import capture, check_input_names, specialized
from .program import Graph, flatten

COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65)  # rows tried together, and one by one
SECONDS = 5.0  # after which no more counts are tried, but for the first two
TOLERANCE = 1e-4  # of the outputs' root mean square
MOST = 4096  # of a size without bounds
TOKENS = 64  # of each row of a language model, that show whether it can be compared at all
Sizes = Mapping[str, tuple[int, int]]
_GUARD = re.compile(
    r"Not all values of (\w+) = (\S+\.size\(\)\[\d+\]) in the specified range .*? satisfy the generated guard "
    r"(.*?)\.?(?:Specializations unexpectedly.*)?$",
    re.MULTILINE,
)
_FORMULA = re.compile(r"(?:[v\d\s()+\-*/%<>=!]|\band\b)+")


@dataclass(frozen=True)
class Capture:
    """A captured graph, and a sentence for people on the sizes that had to be fixed or narrowed, else empty."""

    graph: Graph
    fixed: str = ""


def capture_at_any_sizes(
    module: nn.Module,
    inputs: tuple[TensorSpec, ...],
    samples: Mapping[str, Tensor],
    *,
    sizes: Sizes,
    outputs: tuple[str, ...] = (),
    task: str = "tensors",
    called: nn.Module | None = None,
) -> Capture:
    """Capture with the symbolic sizes that `inputs` name, fixing as few of them as the model requires.

    `called`: what the user calls, where `module` was made of it. The graph's `inputs` have a number in place of "batch"
    where the rows of a batch depend on each other. Raises as `capture` does, with the sizes that must be given as
    numbers and the line of the model's code in the sentence.
    """
    source = _Source(module, called or module, inputs, samples, outputs, task)
    check_input_names(source.called, inputs)
    require_comparable(source.first_call, _few_rows(inputs, samples, sizes, task))
    try:
        return Capture(_with_rows(module, source.agreeing(sizes)))
    except NotUsableError as error:
        if error.__cause__ is None:
            raise
        refusal, reason = error, error.__cause__
    for fixed in _sizes_to_fix(reason, inputs, samples, sizes):
        try:
            graph = source.agreeing(
                {**sizes, **fixed}, asserts=any(low < high for low, high in fixed.values())
            )
        except NotUsableError as error:
            if error.__cause__ is None:
                raise
            continue
        graph = _with_rows(module, graph)
        if (
            isinstance(reason, _OtherNumbersError)
            and graph.sizes.get(BATCH, (0, 1)) == (0, 1)
            and BATCH in fixed
        ):
            break  # one row a request is not what was asked for
        if any(low < high for low, high in fixed.values()):
            named = ", ".join(
                f"{name} {low} to {high}" if low < high else f"{name} {low}"
                for name, (low, high) in fixed.items()
            )
            return Capture(graph, f"narrower sizes: {named} (the model's code takes no others)")
        named = ", ".join(f"{name} {size}" for name, (size, _) in fixed.items())
        rows = ""
        if BATCH in fixed:
            several = all(spec.batched for spec in graph.inputs)
            rows = "; rows run one by one" if several else "; it takes one row a request"
        return Capture(graph, f"fixed sizes: {named} ({_fixing_reason(reason, fixed)}{rows})")
    raise refusal


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

    def first_call(self, inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the outputs of a call that leaves no trace in the buffers."""
        with buffers_kept(self.called):
            return flatten(self.called(**inputs))

    def agreeing(self, sizes: Sizes, *, asserts: bool = False) -> Graph:
        """Capture a graph that gives the numbers that its user sees.

        Raises `NotUsableError` as `capture` does, and for a graph that gives others. Graphs of language models are
        compared later, on whole windows.
        """
        graph = self._capture(sizes, asserts=asserts)
        found = None if self.task == "text-generation" else disagreement(self.called, graph)
        if found is not None and not found.size:
            with contextlib.suppress(NotUsableError), as_if_called(self.module):
                graph = self._capture(sizes, asserts=asserts)
                found = disagreement(self.called, graph)
        if found is None:
            return graph
        where = f" at {found.size} {found.value}" if found.size else ""
        raise NotUsableError(
            f"the captured model gives other numbers than its own code{where}: {found.text}",
            hint="Its code takes another path while it is captured, or by the size of its inputs: write one path for "
            f"all, or give the sizes that it is used with as numbers: {_as_numbers(graph)}",
        ) from _OtherNumbersError(found)

    def _capture(self, sizes: Sizes, *, asserts: bool) -> Graph:
        return capture(
            self.module,
            self.inputs,
            self.samples,
            sizes=sizes,
            outputs=self.outputs,
            task=self.task,
            asserts=asserts,
        )


def _as_numbers(graph: Graph) -> str:
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
    few = {spec.name: samples[spec.name][:rows] if spec.batched else samples[spec.name] for spec in inputs}
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
    found: dict[str, int] = {}
    for spec in inputs:
        for size, have in zip(spec.shape, samples[spec.name].shape, strict=True):
            if isinstance(size, str) and sizes.get(size, (1, 2))[0] < sizes.get(size, (1, 2))[1]:
                found.setdefault(size, 1 if size == BATCH else have)
    named = specialized(reason)
    tried: list[set[str]] = []
    groups = [named, [BATCH], [name for name in found if name != BATCH], list(found)]
    if isinstance(cause, _OtherNumbersError):
        size, value = cause.found.size, cause.found.value
        if size not in found:
            return
        low, high = sizes.get(size, (1, 1))
        if size != BATCH and value == low and low + 1 < high:
            yield {size: (low + 1, high)}
        groups = [[size]]
    for group in groups:
        names = {name for name in group if name in found}
        if names and names not in tried:
            tried.append(names)
            yield {name: (found[name], found[name]) for name in found if name in names}


def _narrower(reason: str, sizes: Sizes, samples: Mapping[Any, int]) -> dict[str, tuple[int, int]]:
    """Return the bounds that the exporter's guards leave to lengths, empty where it calls any size a constant.

    A guard is a formula of one size, such as (height // 8) == 1; what satisfies all of a size, around that of the
    samples, is kept. A batch is left to the capture of one row.
    """
    if "specialized it to be a constant" in reason:
        return {}
    guards: dict[str, list[str]] = {}
    for name, size, guard in _GUARD.findall(reason):
        if name not in sizes or name == BATCH:
            return {}
        formula = guard.replace(size, "v")
        if _FORMULA.fullmatch(formula) and "**" not in formula:
            guards.setdefault(name, []).append(formula)
    found = {name: _run_around(samples[name], every, *sizes[name]) for name, every in guards.items()}
    return {name: bounds for name, bounds in found.items() if sizes[name] != bounds and bounds[0] < bounds[1]}


def _run_around(have: int, guards: list[str], low: int, high: int) -> tuple[int, int]:
    """Return the ends of the run of numbers around `have` that satisfy all guards."""
    compiled = [compile(guard, "guard", "eval") for guard in dict.fromkeys(guards)]

    def holds(value: int) -> bool:
        known = {"v": value}
        return all(eval(guard, {"__builtins__": {}}, known) for guard in compiled)  # noqa: S307 - of _FORMULA

    first, last = have, have
    while first > low and holds(first - 1):
        first -= 1
    while last < high and holds(last + 1):
        last += 1
    return first, last


def _fixing_reason(cause: BaseException, fixed: Sizes) -> str:
    reason = str(cause)
    if isinstance(cause, _OtherNumbersError):
        found = cause.found
        return (
            f"the graph gives other numbers than the model's code at {found.size} {found.value}: {found.text}"
        )
    named = [name for name in specialized(reason) if name in fixed]
    if named:
        return f"the model's code makes a constant of {' and '.join(named)}"
    return f"the exporter can't vary it: {first_sentence(cause).rstrip('.')}"


def _with_rows(module: nn.Module, graph: Graph) -> Graph:
    """Name the first size of the outputs of a graph with a batch of 1, or give that size as a number.

    The name promises that rows are independent. A graph with any other batch is returned as it is.
    """
    if not _is_one_row(graph):
        return graph
    if _rows_are_independent(module, graph):
        return with_named_rows(graph)
    inputs = tuple(_with_row_count(spec, 1) for spec in graph.inputs)
    samples = {name: value[:1] for name, value in graph.samples.items()}
    sizes = {name: size for name, size in graph.sizes.items() if name != BATCH}
    return replace(graph, inputs=inputs, samples=samples, sizes=sizes)


def with_named_rows(graph: Graph) -> Graph:
    """Rename the first size of the outputs "batch" where inputs have a batch of 1 and rows are independent."""
    if not _is_one_row(graph):
        return graph
    return replace(graph, outputs=tuple(_with_row_count(spec, BATCH) for spec in graph.outputs))


def _is_one_row(graph: Graph) -> bool:
    return graph.sizes.get(BATCH) == (1, 1) and all(spec.batched for spec in graph.inputs)


def _with_row_count(spec: TensorSpec, rows: int | str) -> TensorSpec:
    return TensorSpec(spec.name, spec.dtype, (rows, *spec.shape[1:]))


def _rows_are_independent(module: nn.Module, graph: Graph) -> bool:
    """Return true if the model gives the same rows for several inputs at once as for each alone."""
    if not all(spec.shape and spec.shape[0] == 1 for spec in graph.outputs):
        return False
    several = {spec.name: _distinct_rows(graph.samples[spec.name], spec) for spec in graph.inputs}
    with buffers_kept(module), quiet(), torch.no_grad():
        try:
            each: list[list[Tensor]] = []
            began = time.monotonic()
            for count in COUNTS:
                if count > COUNTS[1] and time.monotonic() - began > SECONDS:
                    break
                each += [_call(module, several, row, row + 1) for row in range(len(each), count)]
                together = _call(module, several, 0, count)
                if not all(map(_equal_rows, together, zip(*each, strict=True))):
                    return False
        except Exception:  # noqa: BLE001 - whatever the model raises at other sizes, it does not take them
            return False
    return True


def _distinct_rows(value: Tensor, spec: TensorSpec) -> Tensor:
    rows = spec.with_rows(value, COUNTS[-1])
    if len(value) < len(rows) and rows.is_floating_point():
        scale = torch.linspace(1.0, 0.5, len(rows), dtype=rows.dtype)
        rows = rows * scale.view(-1, *[1] * (rows.dim() - 1))
    return rows


def _call(module: nn.Module, several: Mapping[str, Tensor], start: int, stop: int) -> list[Tensor]:
    return flatten(module(**{name: value[start:stop].clone() for name, value in several.items()}))


def _equal_rows(together: Tensor, each: tuple[Tensor, ...]) -> bool:
    if any(one.dim() == 0 or len(one) != 1 for one in each):
        return False
    alone = torch.cat(each)
    if together.shape != alone.shape:
        return False
    if not together.is_floating_point():
        return torch.equal(together, alone)
    limit = TOLERANCE * float(alone.double().square().mean().sqrt()) + 1e-12
    return bool(torch.allclose(together.double(), alone.double(), rtol=0, atol=10 * limit, equal_nan=True))
