"""Outputs of a model against those of a teacher, for models that take and give named tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UsageError
from ...fidelity.metric_sums import is_logits, kept_rows, rows_of
from ...graph.program import flatten
from ..losses.divergence import row_divergence

LOGITS_UNIT, OUTPUT_UNIT = "KL, nats", "squared relative error"

LayerPairs = tuple[Sequence[nn.Module], Sequence[nn.Module]]  # of a model, and those of its teacher


class OutputObjective:
    """KL of logits where a model has them, else the relative squared error of its outputs; a term is one row.

    Tokens that an `attention_mask` hides are no rows. `model` and `teacher` take the same tensors by name, and give
    those of `outputs`. `layers`: the model's and the teacher's layers whose hidden states are compared with weight
    `hidden`. `unit` is that of the divergence, known after the first call.
    """

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        outputs: Sequence[str],
        task: str,
        *,
        temperature: float = 1.0,
        hidden: float = 0.0,
        layers: LayerPairs | None = None,
    ) -> None:
        self.model, self._teacher, self._outputs, self._task = model, teacher.eval(), tuple(outputs), task
        self._temperature, self.unit = temperature, OUTPUT_UNIT
        self.compared = ComparedLayers(layers, hidden)

    def loss(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        mask = batch.get("attention_mask")
        return self.compared.added(self._divergences(batch), None if mask is None else mask.bool())

    def measure(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the sum of the divergences over the rows of all outputs, without hidden states, and their number."""
        divergences = self._divergences(batch)
        self.compared.drop()
        return divergences

    def _divergences(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            expected = self._named(self._teacher, batch)
        got = self._named(self.model, batch)
        logits = [name for name, value in expected.items() if is_logits(name, value, expected, self._task)]
        used = logits or [name for name, value in expected.items() if value.is_floating_point()]
        if not used:
            raise UsageError("the model has no float output to learn from")
        self.unit = LOGITS_UNIT if logits else OUTPUT_UNIT
        device = expected[used[0]].device
        total, count = torch.zeros((), device=device), torch.zeros((), dtype=torch.int64, device=device)
        for name in used:
            if got[name].shape != expected[name].shape:
                shapes = (
                    f"{list(expected[name].shape)} of the teacher, {list(got[name].shape)} of the student"
                )
                raise UsageError(f"output {name!r} differs in shape: {shapes}")
            want, own = (_rows(side[name], batch, bool(logits)) for side in (expected, got))
            total = total + (
                row_divergence(want, own, self._temperature)
                if logits
                else _squared_error(want.float(), own.float())
            )
            count = count + len(want)
        return total, count

    def _named(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values = flatten(model(**batch))
        names = self._outputs or tuple(f"output{i}" for i in range(len(values)))
        if len(values) != len(names):
            raise UsageError(f"expected {len(names)} outputs, {type(model).__name__} gives {len(values)}")
        return dict(zip(names, values, strict=True))


def _rows(value: Tensor, batch: Mapping[str, Tensor], logits: bool) -> Tensor:
    kept = kept_rows(value, batch)
    rows = rows_of(value, logits, kept is not None)
    return rows if kept is None else rows.index_select(0, kept)


def _squared_error(expected: Tensor, got: Tensor) -> Tensor:
    """Sum squared errors over rows, in units of the mean squared norm of the expected rows."""
    norm = expected.square().sum(1).mean().clamp_min(torch.finfo(torch.float32).tiny)
    return (got - expected).square().sum() / norm


class ComparedLayers:
    """Layers of a model and of its teacher whose hidden states correspond, and their share in a loss."""

    def __init__(self, layers: LayerPairs | None, weight: float) -> None:
        own, theirs = layers if layers is not None and weight else ((), ())
        self.count, self._weight = len(own), weight if layers is not None else 0.0
        self._own, self._theirs = LayerOutputs(own), LayerOutputs(theirs)

    def added(self, loss: tuple[Tensor, Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of a loss with the error of the last hidden states for each of its terms, and the terms."""
        total, terms = loss
        own, theirs = self._own.taken(), self._theirs.taken()
        if self._weight:
            total = total + self._weight * terms * hidden_error(own, theirs, mask)
        return total, terms

    def drop(self) -> None:
        """Drop the last hidden states, which would stay in memory until the next step."""
        self._own.taken()
        self._theirs.taken()

    def release(self) -> None:
        """Let the layers run as before; nothing is added to a loss any more."""
        self._own.remove()
        self._theirs.remove()
        self._weight = 0.0


def outermost_lists(model: nn.Module, accepts: Callable[[nn.ModuleList], bool]) -> dict[str, nn.ModuleList]:
    """Return the lists of layers that are accepted, by name, without those inside of another one."""
    lists: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inner = any(name.startswith(f"{outer}.") for outer in lists)
        if isinstance(module, nn.ModuleList) and not inner and accepts(module):
            lists[name] = module
    return lists


class LayerOutputs:
    """First tensor that each of some layers returned in the last forward pass, kept by hooks."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._found: list[Tensor | None] = [None] * len(layers)
        self._hooks = [layer.register_forward_hook(self._hook(index)) for index, layer in enumerate(layers)]

    def taken(self) -> list[Tensor]:
        """Return the outputs [batch, tokens, hidden] in the order of the layers, and keep none of them."""
        found = [each for each in self._found if each is not None]
        self._found = [None] * len(self._found)
        return found

    def remove(self) -> None:
        """Let the layers run as before, and keep nothing."""
        self.taken()
        for hook in self._hooks:
            hook.remove()

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._found[index] = output if isinstance(output, Tensor) else output[0]

        return keep


def hidden_error(student: Sequence[Tensor], teacher: Sequence[Tensor], mask: Tensor | None) -> Tensor:
    """Return the mean over layers and tokens of |s - t|² / |t|², a differentiable scalar.

    mask bool [batch, tokens] of the tokens that count (default: all); tensors are [batch, tokens, hidden].
    """
    total = torch.zeros((), device=student[0].device)
    for own, wanted in zip(student, teacher, strict=True):
        counted = mask if mask is not None and mask.shape == own.shape[:-1] else None
        total = total + token_errors(own.float(), wanted.float(), counted).mean()
    return total / max(len(student), 1)


def token_errors(got: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
    """Return |s - t|² / |t|² of each token that counts: [rows, tokens, hidden] twice → [number of tokens]."""
    if mask is not None:
        got, target = got[mask], target[mask]
    norm = target.square().sum(-1).clamp_min(1e-12)
    return ((got - target).square().sum(-1) / norm).reshape(-1)
