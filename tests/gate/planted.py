"""Engines with one planted fault each, found by the entry points of a folder: the real pipeline judges what they do."""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from infer import plugins
from infer.graph.program import OnnxGraph
from tests.gate.subjects import Subject, answers, is_special

Tensors = dict[str, Tensor]


@dataclass
class Call:
    """One call of an engine: what it was given and what is right; `memory` lives as long as the engine."""

    subject: Subject
    inputs: Tensors
    outputs: Tensors
    right: Callable[[Mapping[str, Tensor]], Tensors]
    memory: dict[str, Any]

    @property
    def batch(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def main(self) -> Tensor:
        return next(iter(self.outputs.values()))

    @property
    def column(self) -> Tensor:
        """A view of the column of the main output that faults hit."""
        return self.main.select(self.subject.column, self.subject.index)

    @property
    def special(self) -> Tensor:
        return is_special(self.inputs)

    def with_(self, value: Tensor) -> Tensors:
        """Return the outputs with another main output."""
        return {**self.outputs, next(iter(self.outputs)): value}

    @cached_property
    def module(self) -> nn.Module:
        if "module" not in self.memory:
            self.memory["module"] = self.subject.build()
        found: nn.Module = self.memory["module"]
        return found

    def as_if(self, change: Callable[[Any], object]) -> Tensors:
        """Add what a changed copy of the float module would answer instead."""
        if "changed" not in self.memory:
            self.memory["changed"] = copy.deepcopy(self.module)
            change(self.memory["changed"])
        return self.plus(answers(self.subject, self.memory["changed"], self.inputs))

    def plus(self, wrong: Mapping[str, Tensor]) -> Tensors:
        """Add to the outputs what sets these apart from the float module's."""
        float_outputs = answers(self.subject, self.module, self.inputs)
        return {
            name: value + (wrong[name] - float_outputs[name]) if value.is_floating_point() else wrong[name]
            for name, value in self.outputs.items()
        }


Change = Callable[[Call], Mapping[str, Tensor]]


@dataclass
class Plant:
    """Change that is planted: of answers, of steps of a language model, or of an ONNX graph; nothing by default."""

    subject: Subject | None = None
    change: Change | None = None
    step: Callable[[Tensors, Callable[[Tensors], Tensors]], Tensors] | None = None
    edit: Callable[[Any], object] | None = None
    calls: int = 0  # of a wrong engine, so that no fault passes for one that was never run


_planted = [Plant()]


@contextmanager
def planting(plant: Plant) -> Iterator[Plant]:
    """Plant a fault in both backends for a while."""
    _planted.append(plant)
    try:
        yield plant
    finally:
        _planted.pop()


@dataclass
class FaultyRunner:
    """A runner that answers wrongly."""

    runner: Any
    plant: Plant
    memory: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.inputs, self.outputs = self.runner.inputs, self.runner.outputs
        self.attention_length = getattr(self.runner, "attention_length", None)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        self.plant.calls += 1
        if self.plant.step is not None:
            return self.plant.step(dict(inputs), self.runner.run)
        assert self.plant.change is not None
        assert self.plant.subject is not None
        return faulty(self.plant.change, self.plant.subject, self.runner.run, inputs, self.memory)

    def close(self) -> None:
        self.runner.close()


def faulty(
    change: Change,
    subject: Subject,
    right: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    inputs: Mapping[str, Tensor],
    memory: dict[str, Any],
) -> Tensors:
    """Answer one call with a fault; `right` answers without."""

    def call(given: Mapping[str, Tensor]) -> Tensors:
        return {name: value.clone() for name, value in right(given).items()}

    given = {name: value.clone() for name, value in inputs.items()}
    return dict(change(Call(subject, given, call(given), call, memory)))


class PlantedBackend:
    """A backend as it is, but for the runners that it opens and the ONNX files that it is given."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(plugins.get("backends", self._name), name)

    def lower(self, graph: Any, plan: Any, folder: Path) -> Any:
        plant = _planted[-1]
        if plant.edit is not None and isinstance(graph, OnnxGraph):
            graph = dataclasses.replace(graph, path=edited(graph.path, plant.edit, folder / "edited.onnx"))
            plant.calls += 1
        return plugins.get("backends", self._name).lower(graph, plan, folder)

    def open(self, folder: Path, device: str) -> Any:
        runner = plugins.get("backends", self._name).open(folder, device)
        plant = _planted[-1]
        return FaultyRunner(runner, plant) if plant.change or plant.step else runner


def edited(source: Path, edit: Callable[[Any], object], path: Path) -> Path:
    """Write an ONNX model with a wrong optimization in it."""
    import onnx

    model = onnx.load(str(source))
    edit(model)
    onnx.save(model, str(path))
    return path


planted, planted_ort = PlantedBackend("eager"), PlantedBackend("ort")


@contextmanager
def installed(folder: Path) -> Iterator[None]:
    """Make both backends known to this process, and to those that it starts, as a package in `folder` would."""
    place = folder / "planted_faults-1.0.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: planted_faults\nVersion: 1.0\n")
    lines = [f"{name} = {__name__}:{name}" for name in ("planted", "planted_ort")]
    (place / "entry_points.txt").write_text("\n".join(["[infer.backends]", *lines, ""]))
    before = os.environ.get("PYTHONPATH")
    root = Path(__file__).resolve().parents[2]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), str(root), *filter(None, [before])])
    sys.path.insert(0, str(folder))
    plugins._foreign.cache_clear()  # it looked before the folder was there
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)
        plugins._foreign.cache_clear()
