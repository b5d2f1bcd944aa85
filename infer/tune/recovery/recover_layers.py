"""Recovery layer by layer: codes are trained with the float weights and optimizer states of one layer at a time.

Each layer gets the hidden states that the quantized layers before it give, and learns to return what the float model
has there (block-wise training, EfficientQAT: Chen et al. 2024, arXiv 2407.11062).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ...compress.packed_weight import PackedLayer
from ...device import memory
from ...errors import NotUsableError
from ...reporter import Reporter
from ...spec import Finding
from ..data.rows import TensorRows, to_device
from ..objective import Rows
from ..settings import TrainSettings
from ..training_loop import train
from ..training_state import TrainResult
from .layer_calls import LayerCall, SharedTensors, layer_calls
from .objectives import LayerBatches, LayerObjective, RecoveryObjective, Taught, layer_lists
from .recovery_settings import (
    CODE_BYTES,
    FEWEST_CODE_STEPS,
    Call,
    RecoveryBudget,
    measure_call,
    recovery_settings,
)
from .trainable_layers import TrainableLayers, is_table, original_rows

STAGE = "recover"
LAYER_RATE = 4e-3  # of codes
LAYER_ROWS = 4  # of a step: hidden states say more about a layer than logits about the model
EPOCHS = 4  # at least, over rows whose hidden states are kept: computing them takes time too
STATES_SHARE = 0.4  # of the free memory, for hidden states
SETS = 3  # of hidden states: what both layers get, and the targets


@dataclass(frozen=True)
class LayersTask:
    """Models, rows and budget of a recovery layer by layer; `call` is that of both whole models."""

    objective: RecoveryObjective
    teacher: nn.Module
    training: TensorRows
    held_out: TensorRows
    call: Call
    budget: RecoveryBudget
    folder: Path
    seed: int

    @property
    def student(self) -> nn.Module:
        return self.objective.model


@dataclass
class LayersResult:
    """Layers that got better and their codes, steps of all, and the sums of held-out errors before and after."""

    layers: int = 0
    codes: int = 0
    steps: int = 0
    before: float = 0.0
    after: float = 0.0


def recover_layers_if_better(task: LayersTask, why: str, reporter: Reporter) -> list[Finding]:
    """Train layer by layer, and let the model as it was where its outputs get no nearer; return what was found.

    `why`: the reason for it. Raises what `train` raises; layers that can't be trained alone are a finding.
    """
    before, given = _measure(task), _tensors_of(task.student)
    try:
        found = recover_layers(task, layer_lists(task.student, task.teacher), reporter)
    except NotUsableError as error:
        _put_back(given)
        return [Finding(STAGE, "codes trained", 0, "codes", "; ".join(filter(None, (why, str(error)))))]
    after, unit = _measure(task), task.objective.unit
    if better := after < before:
        how = f"{found.layers} layers one after another, {found.steps} steps"
    else:
        how = f"layers one after another did not help: {before:.4g} to {after:.4g}"
        _put_back(given)
    errors = (
        f"error of the layers, sum {found.before:.4g} to {found.after:.4g}; before the layers {before:.4g}"
    )
    return [
        Finding(
            STAGE, "codes trained", found.codes if better else 0, "codes", "; ".join(filter(None, (how, why)))
        ),
        Finding(STAGE, "after layers", min(after, before), unit, errors),
    ]


Given = list[tuple[nn.Module, dict[str, nn.Parameter | None], dict[str, Tensor | None]]]


def _tensors_of(model: nn.Module) -> Given:
    """Return the modules with their own parameters and buffers; training replaces these, and changes none."""
    return [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]


def _put_back(given: Given) -> None:
    for module, parameters, buffers in given:
        module._parameters.update(parameters)
        module._buffers.update(buffers)


@torch.no_grad()
def _measure(task: LayersTask) -> float:
    """Return the mean measure of the whole model on held-out rows."""
    total, count = 0.0, 0.0
    for batch in _batches(task.held_out, range(len(task.held_out))):
        value, terms = task.objective.measure(batch)
        total, count = total + float(value), count + float(terms)
    return total / max(count, 1)


def num_codes(model: nn.Module) -> int:
    """Return the number of codes of packed weights in table formats, each weight counted once."""
    found = {m.packed: m.num_weights for m in model.modules() if isinstance(m, PackedLayer) and is_table(m)}
    return sum(found.values())


def recover_layers(task: LayersTask, lists: Sequence[Sequence[str]], reporter: Reporter) -> LayersResult:
    """Train the student's layers named in `lists` in place, one after another; say what was trained.

    A layer that gets no better on held-out rows stays as it was. Raises `NotUsableError` where the layers of a list
    are no chain (`layer_calls`), where none of them has codes, or where the memory has no room, and what `train`
    raises.
    """
    found, started = LayersResult(), time.perf_counter()
    codes = {name: num_codes(task.student.get_submodule(name)) for names in lists for name in names}
    _check_room(codes, task.call.device)
    judged = list(_batches(task.held_out, range(len(task.held_out))))
    rows = max(task.call.steps(EPOCHS, task.budget), LAYER_ROWS)
    order = task.training.order(task.seed, 0)[:rows]
    for names in lists:
        room = STATES_SHARE * memory.memory_available("cpu")
        batches = [*judged, *_batches(task.training, order)]
        chain = LayerChain(task.student, task.teacher, names, batches, room)
        if len(chain) <= len(judged):
            raise NotUsableError("the memory has no room for the hidden states of rows to train on")
        for index, name in enumerate(names):
            chain.set_targets(index)
            if codes[name]:
                part = _part(task.budget, time.perf_counter() - started, codes, name)
                parts = chain.batches(index, len(judged), len(chain)), chain.batches(index, 0, len(judged))
                reporter.step(STAGE, f"layer {name}")
                _train_layer(task, name, *parts, part, reporter, found)
            chain.advance(index)
    return found


def _check_room(codes: Mapping[str, int], device: str) -> None:
    largest = max(codes.values(), default=0)
    if not largest:
        raise NotUsableError("the model has no list of layers with codes")
    needed, free = CODE_BYTES * largest, memory.memory_available(device)
    if needed > free:
        raise NotUsableError(
            f"states of the largest layer need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )


def _batches(rows: TensorRows, order: Sequence[int]) -> Iterator[dict[str, Tensor]]:
    for start in range(0, len(order), LAYER_ROWS):
        yield rows.batch(order[start : start + LAYER_ROWS])


def _part(budget: RecoveryBudget, spent: float, codes: Mapping[str, int], name: str) -> RecoveryBudget:
    """Return a layer's budget: by its codes of the time that is left; of tokens all, each passes every layer."""
    if budget.seconds is None:
        return budget
    order = list(codes)
    left = sum(codes[other] for other in order[order.index(name) :])
    return replace(budget, seconds=max((budget.seconds - spent) * codes[name] / left, 1.0))


def _train_layer(
    task: LayersTask,
    name: str,
    rows: LayerBatches,
    judged: LayerBatches,
    budget: RecoveryBudget,
    reporter: Reporter,
    found: LayersResult,
) -> None:
    """Train one layer in place where that makes it better on held-out rows, and add to what was found."""
    layer, original = task.student.get_submodule(name), task.teacher.get_submodule(name)
    objective = LayerObjective(layer)
    device = next(layer.parameters(), torch.empty(0)).device
    batch = to_device(rows.batch([0]), device)
    call = measure_call(objective, batch, device.type, batch["hidden"].numel(), 1)
    originals = original_rows(layer, original) if call.steps(1, budget) >= FEWEST_CODE_STEPS else {}
    count = sum(each.numel() for each in originals.values())
    settings = recovery_settings(call, rows, budget, task.seed, codes=count, batch=1)
    if count:
        settings = msgspec.structs.replace(settings, learning_rate=LAYER_RATE)
    trained, folder = TrainableLayers(layer, originals), task.folder / name
    result, better = train_layers(objective, trained, rows, judged, settings, folder, reporter)
    first, best = result.first_held_out or 0.0, result.best_held_out or 0.0
    found.steps += result.steps
    found.before, found.after = found.before + first, found.after + (best if better else first)
    if better:
        found.layers, found.codes = found.layers + 1, found.codes + count


def train_layers(
    objective: Taught,
    trained: TrainableLayers,
    rows: Rows,
    held_out: Rows,
    settings: TrainSettings,
    folder: Path,
    reporter: Reporter,
) -> tuple[TrainResult, bool]:
    """Train in place, and pack what was trained where a step is better on held-out rows than the start.

    Return the result and true where one is; else, and where an error is raised, the model stays as it was.
    """
    objective.trained = trained
    step, better = trained.set_progress, False
    try:
        result = train(
            objective, rows, held_out, settings, folder, reporter, keep_best=True, before_step=step
        )
        first, best = result.first_held_out, result.best_held_out
        if better := first is not None and best is not None and best < first:
            trained.store()
    finally:
        trained.discard()
        for parameter in objective.model.parameters():
            parameter.requires_grad_(False)
    return result, better


class _Side:
    """Layers of one model, their calls in each batch, and the hidden states that the next of them gets."""

    def __init__(self, model: nn.Module, names: Sequence[str], shared: SharedTensors) -> None:
        self.layers = [model.get_submodule(name) for name in names]
        self.calls: list[list[LayerCall]] = []
        self.hidden: list[Tensor] = []
        self._model, self._shared = model, shared

    def record(self, batch: Mapping[str, Tensor]) -> None:
        """Add the layers' calls in a batch, and the hidden states that the first one gets.

        Where all layers had equal calls in the first batch, the pass of a further one ends with the first layer.
        """
        equal = bool(self.calls) and all(call == self.calls[0][0] for call in self.calls[0])
        layers = self.layers[:1] if equal else self.layers
        calls, hidden = layer_calls(self._model, layers, batch, self._shared)
        self.calls.append(calls * len(self.layers) if equal else calls)
        self.hidden.append(hidden.cpu())

    @torch.no_grad()
    def outputs(self, index: int) -> list[Tensor]:
        """Return the hidden states behind a layer, as it is now, in each batch."""
        layer = self.layers[index].eval()
        tensors = (*layer.parameters(), *layer.buffers())
        device = next((each.device for each in tensors), torch.device("cpu"))
        return [
            LayerCall(to_device(dict(calls[index]), device)).run(layer, hidden.to(device)).cpu()
            for calls, hidden in zip(self.calls, self.hidden, strict=True)
        ]


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
        shared, size = SharedTensors(), 0
        self._student, self._teacher = (_Side(model, names, shared) for model in (student, teacher))
        self._masks: list[Tensor | None] = []
        self._targets: list[Tensor] = []
        for batch in batches:
            if size and size > room:
                break
            self._student.record(batch)
            self._teacher.record(batch)
            hidden = self._student.hidden[-1]
            self._masks.append(_mask(batch, hidden))
            size += SETS * hidden.numel() * hidden.element_size()

    def __len__(self) -> int:
        return len(self._masks)

    def batches(self, index: int, start: int, stop: int) -> LayerBatches:
        """Return batches `start` to `stop` of a layer, with the targets that were set."""
        part = slice(start, stop)
        calls = [calls[index] for calls in self._student.calls[part]]
        return LayerBatches(calls, self._student.hidden[part], self._targets[part], self._masks[part])

    def set_targets(self, index: int) -> None:
        """Compute what the float layer returns after the float layers before it."""
        self._targets = self._teacher.outputs(index)

    def advance(self, index: int) -> None:
        """Take the hidden states behind a layer, as it is now, for the next one."""
        self._student.hidden = self._student.outputs(index)
        self._teacher.hidden, self._targets = self._targets, []


def _mask(batch: Mapping[str, Tensor], hidden: Tensor) -> Tensor | None:
    mask = batch.get("attention_mask")
    return mask.bool().cpu() if mask is not None and mask.shape == hidden.shape[:-1] else None
