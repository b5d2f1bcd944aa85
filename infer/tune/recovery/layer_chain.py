"""Hidden states between the layers of a quantized model and of its float original, batch by batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..gradient_accumulation import to_device
from .layer_calls import LayerCall, SharedTensors, layer_calls
from .layer_objective import LayerBatches

SETS = 3  # of hidden states: what both layers get, and the targets


class LayerChain:
    """Layers `names` of student and teacher, and the hidden states that the layer to be trained gets in each batch.

    Batches are read until their states take `room` bytes, one at least. Raises `NotUsableError` where the layers are
    no chain (`layer_calls`).
    """

    def __init__(
        self,
        student: nn.Module,
        teacher: nn.Module,
        names: Sequence[str],
        batches: Iterable[Mapping[str, Tensor]],
        room: float,
    ) -> None:
        self.own = [student.get_submodule(name) for name in names]
        self._float = [teacher.get_submodule(name) for name in names]
        self._calls: list[list[LayerCall]] = []
        self._float_calls: list[list[LayerCall]] = []
        self._hidden: list[Tensor] = []
        self._float_hidden: list[Tensor] = []
        self._masks: list[Tensor | None] = []
        self._targets: list[Tensor] = []
        shared, size = SharedTensors(), 0
        for batch in batches:
            if size and size > room:
                break
            hidden = self._record(student, self.own, self._calls, batch, shared)
            float_hidden = self._record(teacher, self._float, self._float_calls, batch, shared)
            self._hidden.append(hidden.cpu())
            self._float_hidden.append(float_hidden.cpu())
            self._masks.append(_mask(batch, hidden))
            size += SETS * hidden.numel() * hidden.element_size()

    @staticmethod
    def _record(
        model: nn.Module,
        layers: Sequence[nn.Module],
        known: list[list[LayerCall]],
        batch: Mapping[str, Tensor],
        shared: SharedTensors,
    ) -> Tensor:
        """Add the layers' calls in a batch to those known, and return the hidden states that the first one gets.

        Where all layers had equal calls in the first batch, the pass of a further one ends with the first layer.
        """
        if known and all(call == known[0][0] for call in known[0]):
            calls, hidden = layer_calls(model, layers[:1], batch, shared)
            calls = calls * len(layers)
        else:
            calls, hidden = layer_calls(model, layers, batch, shared)
        known.append(calls)
        return hidden

    def __len__(self) -> int:
        return len(self._hidden)

    def batches(self, index: int, start: int, stop: int) -> LayerBatches:
        """Return batches `start` to `stop` of a layer, with the targets that were set."""
        part = slice(start, stop)
        calls = [calls[index] for calls in self._calls[part]]
        return LayerBatches(calls, self._hidden[part], self._targets[part], self._masks[part])

    def set_targets(self, index: int) -> None:
        """Compute what the float layer returns after the float layers before it."""
        calls = [calls[index] for calls in self._float_calls]
        self._targets = _outputs(self._float[index], calls, self._float_hidden)

    def advance(self, index: int) -> None:
        """Take the hidden states behind a layer, as it is now, for the next one."""
        calls = [calls[index] for calls in self._calls]
        self._hidden = _outputs(self.own[index], calls, self._hidden)
        self._float_hidden, self._targets = self._targets, []


@torch.no_grad()
def _outputs(layer: nn.Module, calls: Sequence[LayerCall], hidden: Sequence[Tensor]) -> list[Tensor]:
    device = next((each.device for each in (*layer.parameters(), *layer.buffers())), torch.device("cpu"))
    layer.eval()
    return [
        LayerCall(to_device(dict(call), device)).run(layer, states.to(device)).cpu()
        for call, states in zip(calls, hidden, strict=True)
    ]


def _mask(batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor | None:
    mask = batch.get("attention_mask")
    return mask.bool().cpu() if mask is not None and mask.shape == hidden.shape[:-1] else None
