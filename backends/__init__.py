"""Contract of a backend: lower a graph, open and run the result. The smallest one, `eager`, is the tutorial.

A backend is one file or one folder here, whose name is its name; the file, or the folder's `__init__`, defines the
functions of `Backend`, and the folder holds all that is the backend's alone. It imports `infer`, but no other backend,
and nothing of what calls it: the weight formats, the engine, the run. Imports of optional libraries stand inside the
functions, after `missing()` has been asked. What several backends share is the exporter, `infer/onnx`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from infer.graph.program import Graph
from infer.plan import Plan
from infer.results import Lowered
from infer.spec import TensorSpec


class Runner(Protocol):
    """An opened compiled graph: named tensors in, named tensors out. One call at a time per runner.

    A runner that computes with arrays of numpy may also have `run_arrays`, `run` with dense arrays in place of tensors:
    the Predictor then makes no tensors of arrays. None where it can't.
    """

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Run one batch; inputs and outputs are dense tensors on the runner's device or CPU, shapes already checked."""
        ...

    def close(self) -> None: ...


class Backend(Protocol):
    """Functions and constants of a backend.

    Single layers are lowered like whole models, by the same functions, to be timed before they are quantized.

    A backend that builds for GPUs of other machines also has `AHEAD_OF_TIME`, the sentence that says how such a result
    was compared ("" for any other). One that opens what it can't make here, or can't open what it makes, has
    `unopenable()`, the reason why an artifact of it can't be opened here; for any other that is `missing()`.

    A backend whose lowering takes most of a run declares `COMPILES = True`: "auto" tries it after the others, and only
    where its kernels, timed in plain torch, leave it a chance (`infer/run/compilation_bounds.py`).

    A backend whose quantized layers call the operators of another,
    so that they need not be compiled for it, names that one in `LAYERS_AS`; one that runs layers of several formats in
    the same way has `layer_form(tensors)`, which returns the `LayerForm` of a packed weight, or None.

    A backend without operators for the codes of a quantized source (GGUF, GPTQ, …) declares `CODES = False`: they are
    decoded unless they are asked for. `INSTEAD` maps a format that it can't compute to the one that it takes instead,
    with the reason.

    Where a trial is not faithful enough, others are made with the options that `Lowered.more_exact` names for quantized
    layers, else with the values of the option `CAUTIOUS`, what costs least first.

    `doctor()` returns findings for `infer doctor` besides the one that says whether the backend can run here.
    """

    EXECUTES_CODE: bool  # True when opening what `lower` wrote runs code: the artifact must then be trusted
    PORTABLE: bool  # True when that runs on any machine as it is: the artifact then leaves graph.pt2 and weights/ out
    STEPS: bool  # True when it runs the step of a language model (`infer.llm.step.paged_step`), cache written in place

    def missing(self) -> str | None:
        """Return the reason why this machine can't run the backend at all (`no CUDA device`), or None."""
        ...

    def refuses(self, graph: Graph, plan: Plan) -> str | None:
        """Return the reason why this graph can't be lowered under this plan, or None."""
        ...

    def target(self, device: str) -> dict[str, str]:
        """Return the properties that a compiled result depends on (`isa`, `torch`, `sm`, …).

        When they differ from the ones stored, the graph is lowered again.
        """
        ...

    def lower(self, graph: Graph, plan: Plan, folder: Path) -> Lowered:
        """Compile into `folder/compiled/`. `folder` already holds graph.pt2 and weights/ (see `storage.save`)."""
        ...

    def open(self, folder: Path, device: str) -> Runner:
        """Open what `lower` wrote; `folder` is the artifact's root, its files already verified and trusted."""
        ...
