"""LSTM, GRU and RNN whose weight matrices are layers of their own, so that a format can take each of them.

A format packs the matrices; every call decodes them and computes with torch's own operator (`aten.lstm` and so on),
which a captured program keeps whole. So the weights are smaller on disk and in memory, the time is that of float and of
decoding, and activations stay float in every format.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..layer_kinds import Matrix

KINDS: dict[type[nn.RNNBase], type[nn.RNNBase]] = {}


class _SplitRecurrent(nn.RNNBase):
    """Base of recurrent layers that pass their children's matrices to torch's operator."""

    @property
    def _flat_weights(self) -> list[Any | None]:  # type: ignore[override]
        """Ignore torch's assignment; the parameters themselves are kept."""
        weights = (getattr(self, name) for name in self._flat_weights_names)
        return [weight() if isinstance(weight, nn.Module) else weight for weight in weights]

    @_flat_weights.setter
    def _flat_weights(self, weights: list[Any | None]) -> None:
        """Do nothing: torch sets the flat weights from the parameters."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.RNNBase:
        return nn.Module._apply(self, fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        nn.Module.__setattr__(self, name, value)

    def _update_flat_weights(self) -> None:
        """Skip the update; the list is built at each call."""

    def flatten_parameters(self) -> None:
        """Skip the flattening; the weights do not lie in one buffer."""


class StoredLSTM(_SplitRecurrent, nn.LSTM):
    """`nn.LSTM` with its matrices as children."""


class StoredGRU(_SplitRecurrent, nn.GRU):
    """`nn.GRU` with its matrices as children."""


class StoredRNN(_SplitRecurrent, nn.RNN):
    """`nn.RNN` with its matrices as children."""


KINDS |= {nn.LSTM: StoredLSTM, nn.GRU: StoredGRU, nn.RNN: StoredRNN}


def split_recurrent(model: nn.Module) -> dict[str, str]:
    """Give each weight matrix of every LSTM, GRU and RNN a layer, in place, with unchanged values.

    Returns the new name of each matrix and the name that it had, for a checkpoint that holds it.
    """
    renames: dict[str, str] = {}
    done: dict[int, nn.Module] = {}
    for path, parent in list(model.named_modules(remove_duplicate=False)):
        for attribute, child in list(parent._modules.items()):
            if child is None or type(child) not in KINDS or not _is_plain(child):
                continue
            name = f"{path}.{attribute}" if path else attribute
            made = done.get(id(child)) or _split(child)
            done[id(child)] = made
            parent._modules[attribute] = made
            for matrix in (m for m, layer in made.named_children() if isinstance(layer, Matrix)):
                renames[f"{name}.{matrix}.weight"] = f"{name}.{matrix}"
    return renames


def _is_plain(layer: nn.RNNBase) -> bool:
    """Return true if all weights are parameters, none computed as by weight normalization."""
    return all(layer._parameters.get(name) is not None for name in layer._flat_weights_names)


def _split(layer: nn.RNNBase) -> nn.Module:
    kind = KINDS[type(layer)]
    made: nn.RNNBase = kind.__new__(kind)
    made.__dict__.update(layer.__dict__)
    made.__dict__.pop("_flat_weights", None)
    made.__dict__["_flat_weight_refs"] = []
    made.__dict__["_parameters"] = dict(layer._parameters)
    made.__dict__["_modules"] = dict(layer._modules)
    for name in layer._flat_weights_names:
        parameter = made._parameters[name]
        if parameter is not None and parameter.dim() == 2:
            del made._parameters[name]
            made._modules[name] = Matrix(parameter, type(layer).__name__).train(layer.training)
    return made
