"""Calls of the layers of a list, recorded in a forward pass, so that each layer runs without the model around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import NotUsableError
from ...module_hooks import hooked

PLAIN = (Tensor, bool, int, float, str, torch.dtype, torch.device, type(None))
KEPT = 8  # tensors of one shape that a further one is compared with


class LayerCall(dict[str, Any]):
    """Arguments of one call of a layer: `args`, `kwargs`, and in `place` the index or name of its hidden states.

    A dict, so that its tensors are moved between devices as those of any batch. Calls are equal where their arguments
    are the same objects, as `SharedTensors` makes equal tensors.
    """

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LayerCall) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]

    def _key(self) -> Any:
        return _key(dict(self))

    def run(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """Return the layer's hidden states [rows, tokens, hidden] for others that it gets."""
        args, kwargs = list(self["args"]), dict(self["kwargs"])
        if isinstance(self["place"], str):
            kwargs[self["place"]] = hidden
        else:
            args[self["place"]] = hidden
        return _first(layer(*args, **kwargs))


class SharedTensors:
    """Tensors of many calls, equal ones kept once: masks and positions are those of the call before."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], list[Tensor]] = {}

    def share(self, value: Any) -> Any:
        """Return `value`, its tensors on the CPU and replaced by equal ones that are kept."""
        if isinstance(value, list | tuple):
            return type(value)(self.share(each) for each in value)
        if isinstance(value, dict):
            return {name: self.share(each) for name, each in value.items()}
        if not isinstance(value, Tensor):
            return value
        value = value.detach().cpu()
        known = self._known.setdefault((value.dtype, tuple(value.shape)), [])
        for other in known[-KEPT:]:
            if torch.equal(other, value):
                return other
        known.append(value)
        return value


@torch.no_grad()
def layer_calls(
    model: nn.Module, layers: Sequence[nn.Module], batch: Mapping[str, Tensor], shared: SharedTensors
) -> tuple[list[LayerCall], Tensor]:
    """Return the calls of `layers` without hidden states, and the hidden states that the first one gets.

    The forward pass ends with the last of them. Raises `NotUsableError` where they are no chain: each called once,
    in order, with the hidden states that the layer before returned, and with tensors and numbers otherwise.
    """
    recorder = _Recorder(layers, shared)
    hooks = [
        hook
        for index, layer in enumerate(layers)
        for hook in (
            layer.register_forward_pre_hook(recorder.before(index), with_kwargs=True),
            layer.register_forward_hook(recorder.after(index)),
        )
    ]
    with hooked(hooks), suppress(_EnoughError):
        model.eval()(**batch)
    if len(recorder.calls) < len(layers) or recorder.hidden is None:
        raise NotUsableError(f"of {len(layers)} layers only {len(recorder.calls)} are called")
    return recorder.calls, recorder.hidden


class _EnoughError(Exception):
    """Ends the forward pass after the last layer."""


class _Recorder:
    def __init__(self, layers: Sequence[nn.Module], shared: SharedTensors) -> None:
        self.calls: list[LayerCall] = []
        self.hidden: Tensor | None = None
        self._last, self._shared, self._returned = len(layers) - 1, shared, None

    def before(self, index: int) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            name = type(module).__name__
            if index != len(self.calls):
                raise NotUsableError(f"layer {index} ({name}) is called out of order or more than once")
            given: dict[int | str, Any] = dict(enumerate(args))
            given.update(kwargs)
            place = self._place(given)
            if place is None:
                raise NotUsableError(f"layer {index} ({name}) does not get what the layer before it returned")
            if strange := [key for key, value in given.items() if not _is_plain(value)]:
                kind = type(given[strange[0]]).__name__
                raise NotUsableError(f"layer {index} ({name}) gets a {kind} as {strange[0]!r}")
            if self.hidden is None:
                self.hidden = given[place].detach()
            rest = {key: None if key == place else self._shared.share(value) for key, value in given.items()}
            own = tuple(rest[key] for key in range(len(args)))
            named = {key: rest[key] for key in kwargs}
            self.calls.append(LayerCall(args=own, kwargs=named, place=place))

        return record

    def _place(self, given: Mapping[Any, Any]) -> int | str | None:
        """Return the key of the hidden states: of what the layer before returned, of the first ones at the begin."""
        for key, value in given.items():
            if value is self._returned if self._returned is not None else is_hidden(value):
                return key
        return None

    def after(self, index: int) -> Any:
        def keep(module: nn.Module, _inputs: Any, output: Any) -> None:
            self._returned = _first(output)
            if not is_hidden(self._returned):
                raise NotUsableError(f"layer {index} ({type(module).__name__}) returns no hidden states")
            if index == self._last:
                raise _EnoughError

        return keep


def is_hidden(value: object) -> bool:
    """Return true for hidden states, a float tensor [rows, tokens, hidden]."""
    return isinstance(value, Tensor) and value.dim() == 3 and value.is_floating_point()


def _first(output: Any) -> Any:
    return output if isinstance(output, Tensor) else output[0]


def _key(value: Any) -> Any:
    """Return what two arguments have in common where they are equal, or the same tensors."""
    if isinstance(value, list | tuple):
        return tuple(_key(each) for each in value)
    if isinstance(value, dict):
        return tuple((name, _key(each)) for name, each in value.items())
    return id(value) if isinstance(value, Tensor) else value


def _is_plain(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(value, PLAIN)
