"""Named arrays, and their collation: check, split, pad and concatenate requests into a batch, and split its outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import DTypeLike

from ... import rows
from ...artifact.model_info import ModelInfo
from ...errors import InferError, InputError
from ...spec import BATCH, TensorSpec, check_sizes, work_of_rows

Arrays = dict[str, np.ndarray]
MASK = "attention_mask"  # input that is 0 for padding
Allocate = Callable[
    [str, tuple[int, ...], DTypeLike], np.ndarray
]  # name, shape, dtype → uninitialized array for that input


class RequestSize(NamedTuple):
    """Size of one request.

    `sizes`: symbolic sizes; `key`: batch key; `elements`: of a row of its largest input; `row_work`: see `QueueItem`.
    """

    sizes: dict[str, int]
    key: Hashable
    rows: int
    elements: int
    size_bytes: int
    row_work: float


class Collator:
    """Collation by the facts of a model: its inputs, outputs and sizes, and which requests may share a batch.

    - `batched`: inputs and outputs have rows, which do not depend on each other: requests share batches.
    - `plain`: all rows lie along the first axis, and no input may be left out.
    - `states`: inputs that are zeros where they are left out.
    - `lengths`: sizes that padding can fill, because each input that has them names a padding value and each output can
      be cut back; `ragged`: those of them that may differ within one batch, because padding changes no answer.
    - `packed`: the model computes no padding, so that rows of any length share a batch at the cost of real tokens.

    bfloat16 is held in uint16 arrays: numpy has no such type.
    """

    def __init__(self, info: ModelInfo, max_batch: int | None = None) -> None:
        self.inputs = {spec.name: _stored(spec) for spec in info.inputs}
        self.outputs = {spec.name: spec for spec in info.outputs}
        self.sizes, self._multiples, self.padding = info.sizes, info.multiples, info.padding
        self.joins, self.states = info.joins, info.states
        self.batched = self.joins != "none" and rows.are_joinable(info.inputs, info.outputs)
        limit = min(info.max_batch, max_batch or info.max_batch)
        self.max_batch = limit if self.batched else 1
        self.axes = {spec.name: spec.batch_axis or 0 for spec in info.outputs}
        self.plain = not self.states and rows.lie_first((*info.inputs, *info.outputs))
        self.lengths = self._lengths()
        self.ragged = self.lengths if self.batched and self.joins == "padded" else frozenset()
        self._attention_length = info.attention_length
        self.packed = self._attention_length is not None and bool(self.ragged) and MASK in self.inputs
        self._quick = [(s.name, np.dtype(s.dtype), s.shape, len(s.shape)) for s in self.inputs.values()]

    def _lengths(self) -> frozenset[str]:
        named = {s for spec in self.inputs.values() for s in spec.shape if isinstance(s, str)} - {BATCH}
        unknown = (
            {s for spec in self.outputs.values() for s in spec.shape if isinstance(s, str)} - named - {BATCH}
        )
        padded = {s for s in named if all(n in self.padding for n, i in self.inputs.items() if s in i.shape)}
        return frozenset() if unknown else frozenset(padded)

    def _sizes(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int] | None:
        """Return the symbolic sizes of one request; None if a name, dtype or shape does not match."""
        bound: dict[str, int] = {}
        for name, dtype, shape, rank in self._quick:
            array = arrays.get(name)
            if array is None or array.dtype != dtype or array.ndim != rank:
                return None
            for want, have in zip(shape, array.shape, strict=True):
                if (bound.setdefault(want, have) if isinstance(want, str) else want) != have:
                    return None
        return bound if len(arrays) == len(self._quick) else None

    def complete(self, arrays: Arrays) -> Arrays:
        """Return the inputs of one request with zeros for the states that it leaves out."""
        absent = [spec for name, spec in self.inputs.items() if name in self.states and name not in arrays]
        if not absent:
            return arrays
        sizes = {
            size: have
            for name, array in arrays.items()
            if name in self.inputs
            for size, have in zip(self.inputs[name].shape, array.shape, strict=False)
            if isinstance(size, str)
        }
        whole = dict(arrays)
        for spec in absent:
            shape = [sizes.get(size, 1) if isinstance(size, str) else size for size in spec.shape]
            whole[spec.name] = np.zeros(shape, spec.dtype)
        return {name: whole.pop(name) for name in self.inputs if name in whole} | whole

    def check(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Return the symbolic sizes of one request. Raises `InputError`; not for too many rows: see `split`."""
        bound = self._sizes(arrays)
        if bound is None:
            bound = self._explain(arrays)
        check_sizes(bound, self.sizes, splits=self.batched, joins=self.joins, multiples=self._multiples)
        return bound

    def _explain(self, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
        """Raise `InputError` with the first mismatch; return the sizes if there is none."""
        surplus = sorted(set(arrays) - set(self.inputs))
        if surplus or len(arrays) != len(self.inputs):
            missing = [name for name in self.inputs if name not in arrays]
            wrong = (
                f"missing input {self.inputs[missing[0]]}"
                if missing
                else f"no input named {surplus[0][:128]!r}"
            )
            expected = ", ".join(str(spec) for spec in self.inputs.values())
            raise InputError(f"{wrong}; expected {expected}", where="request.inputs")
        bound: dict[str, int] = {}
        for index, (name, spec) in enumerate(self.inputs.items()):
            spec.check(arrays[name], f"request.inputs[{index}]", bound)
        return bound

    def key(self, sizes: Mapping[str, int]) -> Hashable:
        """Return the batch key: requests of equal key may share a batch. `check` made dtypes and fixed sizes equal."""
        free = self.ragged if self.packed else frozenset()
        return tuple(
            sorted(
                (s, length_bucket(n) if s in self.ragged else n)
                for s, n in sizes.items()
                if s not in free and (s != BATCH or not self.batched)
            )
        )

    def _shared(self, arrays: Arrays) -> tuple[bytes, ...]:
        """Return the content of what all rows of a request share: other requests join it only with the same."""
        own = [arrays[name] for name, spec in self.inputs.items() if not spec.batched] if self.batched else []
        return tuple(
            array.tobytes() if array.nbytes <= 64 else hashlib.sha256(array.tobytes()).digest()
            for array in own
        )

    def measure(self, arrays: Arrays) -> RequestSize:
        """Return the size of a request. Raises `InputError`."""
        sizes = self.check(arrays)
        count = sizes.get(BATCH, 1) if self.batched else 1
        elements = max((array.size // max(count, 1) for array in arrays.values()), default=0)
        size = sum(array.nbytes for array in arrays.values())
        key, shared = self.key(sizes), self._shared(arrays)
        if shared:
            key = (key, *shared)
        return RequestSize(sizes, key, count, elements, size, self.row_work(arrays))

    def row_work(self, arrays: Arrays) -> float:
        """Return the mean work of the rows of a request to a model that computes no padding; 0.0 of any other."""
        if not self.packed or self._attention_length is None:
            return 0.0
        mask = arrays[MASK]
        if len(mask) == 1:  # the usual request; numpy takes three times as long
            return (tokens := max(int(mask.sum()), 1)) * (1 + tokens / self._attention_length)
        lengths = mask.sum(axis=1).clip(1)
        return work_of_rows(lengths, self._attention_length) / max(len(lengths), 1)

    def split(self, arrays: Arrays, count: int) -> list[Arrays]:
        """Split a request of `count` rows into parts of at most `max_batch` rows, in order."""
        if not self.batched or count <= self.max_batch:
            return [arrays]
        return [
            rows.cut(self.inputs.values(), arrays, start, start + self.max_batch)
            for start in range(0, count, self.max_batch)
        ]

    def collate(self, parts: Sequence[Arrays], new: Allocate | None = None) -> tuple[Arrays, float]:
        """Concatenate requests along the batch, padded, into arrays of `new`; also return the share of padding."""
        joined, real, total = {}, 0, 0
        for name, spec in self.inputs.items():
            arrays = [part[name] for part in parts] if spec.batched else [parts[0][name]]
            axis = spec.batch_axis or 0
            shape = _shape(arrays, axis)
            target = np.empty(shape, arrays[0].dtype) if new is None else new(name, shape, arrays[0].dtype)
            joined[name] = _stack(arrays, axis, self.padding.get(name, 0), target)
            real += sum(array.size for array in arrays)
            total += joined[name].size
        return joined, 1 - real / total if total else 0.0

    def split_outputs(
        self, outputs: Mapping[str, np.ndarray], sizes: Sequence[Mapping[str, int]]
    ) -> list[Arrays]:
        """Return the outputs of each request. `sizes`: of each, in the order of `collate`. Raises `InferError`."""
        if not self.batched:
            return [dict(outputs)]
        count = sum(size[BATCH] for size in sizes)
        for name, array in outputs.items():
            shape, axis = array.shape, self.outputs[name].batch_axis
            if axis is None or len(shape) <= axis or shape[axis] != count:
                raise InferError(f"expected {count} rows of output, the model returned another number")
        results: list[Arrays] = []
        start = 0
        for size in sizes:
            stop = start + size[BATCH]
            results.append(
                {name: array[self._window(name, start, stop, size)] for name, array in outputs.items()}
            )
            start = stop
        return results

    def _window(self, name: str, start: int, stop: int, size: Mapping[str, int]) -> tuple[slice, ...]:
        return tuple(
            slice(start, stop) if d == BATCH else slice(size[d]) if d in self.ragged else slice(None)  # type: ignore[index]
            for d in self.outputs[name].shape
        )


def length_bucket(length: int) -> int:
    """Return the least of 16, 24, 32, 48, 64, 96, … that is at least `length`; above 16, padding is below a third."""
    if length <= 16:
        return 16
    power = 1 << (length - 1).bit_length()
    return power * 3 // 4 if length <= power * 3 // 4 else power


def _shape(arrays: list[np.ndarray], axis: int) -> tuple[int, ...]:
    """Return the shape that holds the rows of each array, along `axis`, with padding."""
    if len(arrays) == 1:
        return arrays[0].shape
    sizes = [max(sizes) for sizes in zip(*[array.shape for array in arrays], strict=True)]
    sizes[axis] = sum([array.shape[axis] for array in arrays])
    return tuple(sizes)


def _stack(arrays: list[np.ndarray], axis: int, pad: int, target: np.ndarray) -> np.ndarray:
    """Copy all rows into `target`; fill the rest with `pad`."""
    if len(arrays) == 1:
        target[...] = arrays[0]
        return target
    rest = (*target.shape[:axis], *target.shape[axis + 1 :])
    if all((*array.shape[:axis], *array.shape[axis + 1 :]) == rest for array in arrays):
        np.concatenate(arrays, axis, out=target)
        return target
    target.fill(pad)
    start = 0
    for array in arrays:
        place = [slice(size) for size in array.shape]
        place[axis] = slice(start, start + array.shape[axis])
        target[tuple(place)] = array
        start += array.shape[axis]
    return target


def _stored(spec: TensorSpec) -> TensorSpec:
    return msgspec.structs.replace(spec, dtype="uint16") if spec.dtype == "bfloat16" else spec
