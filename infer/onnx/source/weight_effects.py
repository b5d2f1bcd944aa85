"""Effect of int8 in each weight of an ONNX file on its outputs: the few weights that need more bits.

A weight's rounding error says little of the answer: in a text detector three of 21 weights, a thirteenth of the values,
make nine tenths of it. One session has the difference that int8 makes to each weight as a further addend, and a factor
of it as an input, so that a trial is a call.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.torch
from torch import Tensor

from ...errors import NotUsableError
from .. import ort_session
from ..export import save
from ..rewrite import GraphBuilder
from . import FINER, MIXED, source_weights

if TYPE_CHECKING:
    import onnx_ir as ir

SECONDS = 5.0  # of all calls; where there are more weights than calls, neighbours are tried together
MOST_BYTES = 1 << 29  # of weights, which the session holds twice
# Of the error, by weights that get more bits.
REDUCTIONS = {MIXED: 4.0, FINER: 16.0}
QUIET_SHARE = 0.05  # of the deviation of the liveliest slice, the unit of quieter ones
LEAST_SHARE = 1e-3  # the unit of outputs from 0 to 1 that vary less: their rounding is that of 1
SHARES = "infer/shares"


def worst(source: Path, inputs: Mapping[str, Tensor], reduction: float) -> set[str]:
    """Return the names of the weights whose exact values make the error of the outputs `reduction` times smaller: those
    with most of it by value.

    `inputs`: one batch. Effects are taken to be independent, so that their squares add up. Raises `NotUsableError`
    where the file does not run on them.
    """
    batch = safetensors.torch.save({name: value.contiguous() for name, value in inputs.items()})
    effects = _effects(source, source.stat().st_mtime_ns, batch)
    left, chosen = sum(effect**2 for effect, _ in effects.values()), set[str]()
    allowed = left / reduction**2
    for name in sorted(effects, key=lambda name: -(effects[name][0] ** 2) / effects[name][1]):
        if left <= allowed:
            break
        chosen.add(name)
        left -= effects[name][0] ** 2
    return chosen


@lru_cache(maxsize=1)  # backends, and levels of one, ask the same
def _effects(source: Path, changed: int, batch: bytes) -> dict[str, tuple[float, int]]:
    """Return the effect of each weight, its share of its own norm where all are too large to hold twice, and its number
    of values.

    `changed`: when the file was, in nanoseconds; `batch`: inputs as the bytes of a safetensors file.
    """
    import onnx_ir as ir

    model = ir.load(str(source))
    weights = source_weights.find(model)
    rounded = source_weights.rounded(model.graph, weights)
    if sum(num_bytes for _, _, num_bytes in weights.found.values()) > MOST_BYTES:
        return {
            name: (
                float(np.linalg.norm(after - before)) / max(float(np.linalg.norm(before)), 1e-30),
                before.size,
            )
            for name, (before, after) in rounded
        }
    differences = {name: after - before for name, (before, after) in rounded}
    effects = _measured(model, differences, safetensors.torch.load(batch)) if differences else {}
    return {name: (effect, differences[name].size) for name, effect in effects.items()}


def _measured(
    model: ir.Model, differences: Mapping[str, np.ndarray], inputs: Mapping[str, Tensor]
) -> dict[str, float]:
    """Return by how much the outputs move with each difference, added to its weight alone; see `_moved`."""
    import onnx_ir as ir

    names = list(differences)
    graph = model.graph
    emit = GraphBuilder(graph, graph[0])
    emit.prefix = "infer/effects"
    shares = ir.val(SHARES, ir.DataType.FLOAT, [len(names)])
    graph.inputs.append(shares)
    for index, (name, difference) in enumerate(differences.items()):
        value = graph.initializers[name]
        share = emit("Gather", shares, emit.scalar(index, np.int64), axis=0)
        added = emit("Mul", emit.constant(f"{name}/difference", difference), share)
        sum_of = emit("Add", value, added)
        sum_of.dtype, sum_of.shape = ir.DataType.FLOAT, ir.Shape(difference.shape)
        keeps = sum_of.producer()
        ir.convenience.replace_all_uses_with(value, sum_of)
        keeps.replace_input_with(0, value)
    graph.insert_before(graph[0], emit.nodes)
    with tempfile.TemporaryDirectory(prefix="infer-effects-") as folder:
        path = Path(folder) / "model.onnx"
        save(model, path)
        try:
            opened: Any = ort_session.open_session(path, "cpu")
            return _tried(opened, names, inputs)
        except ort_session.runtime_errors() as error:
            raise NotUsableError(
                f"the effects of its weights can't be measured: {ort_session.clean_error_message(error)}"
            ) from error


def _tried(opened: Any, names: Sequence[str], inputs: Mapping[str, Tensor]) -> dict[str, float]:
    taken = {value.name for value in opened.get_inputs()}
    feeds = {name: value.numpy() for name, value in inputs.items() if name in taken}

    def outputs(which: Sequence[int]) -> list[np.ndarray]:
        shares = np.zeros(len(names), np.float32)
        shares[list(which)] = 1.0
        return ort_session.run_session(opened, None, {**feeds, SHARES: shares})  # type: ignore[no-any-return]

    outputs(())
    start = time.perf_counter()
    want = outputs(())
    calls = max(int(SECONDS / max(time.perf_counter() - start, 1e-6)), 1)
    effects: dict[str, float] = {}
    for group in np.array_split(np.arange(len(names)), min(calls, len(names))):
        moved = _moved(want, outputs(group.tolist())) / len(group) ** 0.5
        effects |= {names[index]: moved for index in group}
    return effects


def _moved(want: Sequence[np.ndarray], got: Sequence[np.ndarray]) -> float:
    """Return the error of the float output that moves most: the root mean square over the slices of an axis, each in
    units of its deviation, of the axis where that is largest. Values that are not finite on either side do not count.
    """
    largest = 0.0
    for exact, other in zip(want, got, strict=True):
        if exact.dtype.kind != "f" or not exact.size:
            continue
        reference = exact.astype(np.float64)
        square = np.square(other.astype(np.float64) - reference)
        finite = np.isfinite(square)
        reference, square = np.where(finite, reference, 0.0), np.where(finite, square, 0.0)
        is_share = reference.min() >= 0.0 and reference.max() <= 1.0
        least = LEAST_SHARE**2 if is_share else 1e-30
        for axis in range(1, max(exact.ndim, 2)):
            others = tuple(i for i in range(exact.ndim) if i != axis)
            unit = reference.var(axis=others)
            unit = np.maximum(unit, max(QUIET_SHARE**2 * float(unit.max()), least))
            largest = max(largest, float(np.sqrt((square.mean(axis=others) / unit).mean())))
    return largest
