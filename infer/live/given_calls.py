"""Calls of a module from what its user has as data: tensors, dicts, loaders, datasets, generators."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UsageError
from ..library_errors import describe
from .call_structure import CallReader, copied, tensors_of

MOST_CALLS = 64  # that are read of a loader
MOST_BYTES = 256 << 20
DATASET_ROWS = 8  # of a dataset, that make one call
LABELS = frozenset(("labels", "label", "label_ids", "targets", "target", "start_positions", "end_positions"))


@dataclass(frozen=True)
class Call:
    """Arguments of one call of a module."""

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in tensors_of((self.args, dict(self.kwargs))))

    def copied(self, *, tensors: bool = False) -> Call:
        """Return the call with containers of its own, and with tensors of its own where asked for."""
        value = (self.args, dict(self.kwargs))
        args, kwargs = copied(value, lambda tensor: tensor.detach().clone() if tensors else tensor)
        return Call(args, kwargs)


def given_calls(module: nn.Module, data: Any, select: Callable[[Any], Any] | None) -> list[Call]:
    """Return the calls that `data` stands for, at most `MOST_CALLS` of at most `MOST_BYTES`.

    A tensor is one call, a tuple its positional arguments, a dict its named ones (or the one argument, of a model that
    takes a dict). Anything else is iterated: each item is a call. `select` takes from an item what the model takes,
    such as `lambda row: row[0]`; without it labels are left out of a tuple where the model does not take them, and of a
    dict by their names. Raises `UsageError` for data without a call that the model takes.
    """
    reader = CallReader(module)
    whole = isinstance(data, Tensor | np.ndarray | Mapping | tuple)
    items: Iterable[Any] = [data] if whole else _items(data)
    calls: list[Call] = []
    room, reading = MOST_BYTES, None
    for item in itertools.islice(_iterated(items), MOST_CALLS):
        row = _as_tensors(item if select is None else select(item))
        readings = list(_readings(reader, row, whole=whole or select is not None))
        if reading is None:
            reading = _first_taken(module, readings)
        call = readings[min(reading, len(readings) - 1)]
        if calls and call.num_bytes > room:
            break
        room -= call.num_bytes
        calls.append(call)
    if not calls:
        raise UsageError("the data has no row", where="data", hint="Give at least one call of the model")
    return calls


def _items(data: Any) -> Iterable[Any]:
    """Return what is iterated: batches of a dataset, whose items are single rows, and anything else as it is."""
    if hasattr(data, "column_names") and hasattr(data, "with_format"):  # datasets.Dataset
        data = data.with_format("torch")
        if not hasattr(data, "__len__"):
            return data.iter(batch_size=DATASET_ROWS)
        return (data[start : start + DATASET_ROWS] for start in range(0, len(data), DATASET_ROWS))
    if isinstance(data, torch.utils.data.Dataset):
        return torch.utils.data.DataLoader(data, batch_size=DATASET_ROWS)
    if not isinstance(data, Iterable) or isinstance(data, str | bytes):
        raise UsageError(
            f"expected tensors, a dict or a loader of them, got {type(data).__name__}",
            where="data",
            hint="Example: infer.compile(model, data=torch.utils.data.DataLoader(...))",
        )
    return data


def _iterated(items: Iterable[Any]) -> Iterator[Any]:
    try:
        yield from items
    except Exception as error:
        raise UsageError(f"the data raised {describe(error)}", where="data") from error


def _first_taken(module: nn.Module, readings: Sequence[Call]) -> int:
    """Return which reading of a row the model takes; later rows are read alike."""
    refusals: list[str] = []
    for index, call in enumerate(readings):
        try:
            own = call.copied()  # a module may write into the dicts that it is given
            with torch.no_grad():
                module(*own.args, **own.kwargs)
        except Exception as error:  # noqa: BLE001 - it is the model that says what it takes
            refusals.append(describe(error))
        else:
            return index
    raise UsageError(
        f"the model does not take the data: {refusals[0]}",
        where="data",
        hint="Give its arguments: a tensor, a tuple, a dict; of other rows select=lambda row: ... takes them",
    )


def _readings(reader: CallReader, item: Any, *, whole: bool) -> Iterator[Call]:
    """Yield the calls that an item may mean, the most usual first."""
    if isinstance(item, Mapping):
        named = {
            str(key): value
            for key, value in item.items()
            if key in reader.by_name or reader.takes_any_keyword
        }
        inference = {name: value for name, value in named.items() if name not in LABELS}
        if inference:
            yield Call((), inference)
            if len(inference) < len(named):
                yield Call((), named)
        yield Call((item,))
    elif isinstance(item, tuple | list):
        yield Call(tuple(item))
        if not whole:  # a row of a loader: what stands behind the inputs are labels
            yield from (
                reading for n in range(len(item) - 1, 0, -1) for reading in _shorter(reader, item[:n])
            )
        yield Call((item,))
    else:
        yield Call((item,))


def _shorter(reader: CallReader, items: Any) -> Iterator[Call]:
    if len(items) == 1 and isinstance(items[0], Mapping):
        yield from _readings(reader, items[0], whole=True)
    yield Call(tuple(items))


def _as_tensors(item: Any) -> Any:
    return pytree.tree_map(
        lambda leaf: torch.from_numpy(leaf) if isinstance(leaf, np.ndarray) else leaf, item
    )
