"""Low-rank adapters in the captured step (Hu et al., "LoRA", 2021): x W + (x A) B, with another A and B for each token.

The A and B of all slots stand in one input of the graph, `adapter_weights`; `adapter_index` says for each token which
slot is its own, 0 for none. A layer computes x A for all slots at once, keeps of it what belongs to the token's slot
and multiplies by the B of all slots: two thin products, without gathering weights, and exactly zero for tokens of no
adapter. Nothing here is in a graph that was made without adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from ...errors import NotUsableError
from ...spec import Finding

INDEX, WEIGHTS = "adapter_index", "adapter_weights"
_ALIGN = 16  # floats


class AdaptedLayer(msgspec.Struct, frozen=True):
    """Linear layer that takes adapters. `start`: of its A [slots · rank, inputs] in the buffer; B follows."""

    name: str
    inputs: int
    outputs: int
    start: int


class AdapterShape(msgspec.Struct, frozen=True):
    """Room for `slots` adapters of at most `rank`; stored in the manifest within the `StepShape`."""

    slots: int
    rank: int
    sites: tuple[AdaptedLayer, ...]

    @property
    def size(self) -> int:
        """Number of float32 values in the adapter buffer."""
        last = self.sites[-1]
        return last.start + self.room(last.inputs, last.outputs)

    def findings(self) -> list[Finding]:
        what = f"{self.slots} adapters of rank {self.rank}"
        return [Finding("capture", what, 4 * self.size, "bytes", f"at {len(self.sites)} linear layers")]

    def room(self, inputs: int, outputs: int) -> int:
        """Return the number of floats for one layer's A and B matrices of all slots, aligned."""
        return -(-self.slots * self.rank * (inputs + outputs) // _ALIGN) * _ALIGN

    def parts(self, buffer: Tensor, site: AdaptedLayer) -> tuple[Tensor, Tensor]:
        """Return views of the A and the B of all slots, [slots · rank, inputs] and [slots · rank, outputs]."""
        rows = self.slots * self.rank
        middle, stop = site.start + rows * site.inputs, site.start + rows * (site.inputs + site.outputs)
        return buffer[site.start : middle].view(rows, site.inputs), buffer[middle:stop].view(
            rows, site.outputs
        )

    def none(self, tokens: int, device: str = "cpu") -> dict[str, Tensor]:
        """Return the inputs of a step that uses no adapter."""
        index = torch.zeros(tokens, dtype=torch.int64, device=device)
        return {INDEX: index, WEIGHTS: torch.zeros(self.size, device=device)}


def adapter_shape(
    model: nn.Module, run: Callable[[], object], tokens: int, slots: int, rank: int
) -> AdapterShape:
    """Lay out the buffer for the linear layers, except the head, that see each of `tokens` tokens once in `run()`.

    Raises `NotUsableError` when there are none.
    """
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    seen: dict[str, list[tuple[int, int, int]]] = {}

    def look(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
            inputs = args[0]
            seen.setdefault(name, []).append((inputs[..., 0].numel(), inputs.shape[-1], output.shape[-1]))

        return hook

    linears = {n: m for n, m in model.named_modules() if _is_linear(m) and m is not head}
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for name, module in linears.items():
            hooks.callback(module.register_forward_hook(look(name)).remove)
        run()
    shape, start = AdapterShape(slots, rank, ()), 0
    sites = []
    for name in linears:
        calls = seen.get(name, [])
        if len(calls) == 1 and calls[0][0] == tokens:
            sites.append(AdaptedLayer(name, calls[0][1], calls[0][2], start))
            start += shape.room(calls[0][1], calls[0][2])
    if not sites:
        raise NotUsableError("the model has no linear layers that could take adapters")
    return AdapterShape(slots, rank, tuple(sites))


@contextlib.contextmanager
def adapted(
    model: nn.Module, shape: AdapterShape | None, tensors: Callable[[], Mapping[str, Tensor]]
) -> Iterator[None]:
    """Add the low-rank terms to the layers of `model` while it is captured; `tensors`: the inputs of the call."""
    if shape is None:
        yield
        return

    def add(site: AdaptedLayer) -> Callable[..., Tensor]:
        def hook(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            named = tensors()
            low = term(args[0], named[INDEX], shape.slots, *shape.parts(named[WEIGHTS], site))
            return output + low.to(output.dtype)

        return hook

    modules = dict(model.named_modules())
    with contextlib.ExitStack() as hooks:
        for site in shape.sites:
            hooks.callback(modules[site.name].register_forward_hook(add(site)).remove)
        yield


def term(x: Tensor, index: Tensor, slots: int, a: Tensor, b: Tensor) -> Tensor:
    """Compute (x A) B for each token's slot, float32 [..., tokens, outputs].

    x [..., tokens, inputs], index int64 [tokens], a [slots · rank, inputs], b [slots · rank, outputs].
    """
    inner = torch.nn.functional.linear(x.float(), a).unflatten(-1, (slots, -1))
    own = index[:, None, None] == torch.arange(1, slots + 1, device=index.device)[:, None]
    # Not a product with zero: what another adapter makes of this token may be infinite.
    return torch.where(own, inner, 0.0).flatten(-2) @ b


def _is_linear(module: nn.Module) -> bool:
    quantized = getattr(type(module), "is_linear", False)  # `compress.layers.QuantizedLinear`
    return isinstance(module, nn.Linear) or quantized or type(module).__name__ == "Conv1D"
