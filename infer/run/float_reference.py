"""The float original in the forms that trials are compared with and timed against.

What outputs are compared with shares no graph, optimizer or engine with what is judged: it is the user's own module,
called as its users call it, and of an ONNX file ONNX Runtime on the CPU with every graph optimization off. An IR has no
engine but OpenVINO, which runs the user's file beside the artifact. What times are compared with is what the user has
today, and the float graph on the backends tried.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import latency, library_errors, plugins, rows
from ..errors import InferError, NotUsableError, ResourceError
from ..graph import encoder_decoder_graphs, row_independence, storage
from ..graph.program import (
    ENCODER,
    Graph,
    OnnxGraph,
    OpenvinoGraph,
    StreamedGraph,
)
from ..graph.row_independence import Joining
from ..llm.step.step_shape import StepShape
from ..load.loaded_model import LoadedModel
from ..load.samples.fatal_sizes import InputTrials
from ..onnx.trial_process import Runtime
from ..plan import Plan
from ..spec import BATCH, Finding, TensorSpec
from .original_runners import Eager, UserFileRunner, UserModuleRunner, onnx_runtime
from .remembered_outputs import RememberedOutputs
from .rounded_originals import rounded
from .trial import Trial

EAGER = "torch eager"
FLOAT_FORM = " float32"  # behind the name of a backend
ONNX_RUNTIME = "ONNX Runtime"  # the user's own file in it, as the user runs it
OPENVINO = "OpenVINO"  # of an IR, as above


class FloatReferences:
    """Float original in each form that trials are compared with or timed against, lowered once.

    `lowered_as` returns the graph of the original as a step of a shape, or of whole inputs, where `original` is none;
    `module` is the user's own module, of which no layer was changed.
    """

    def __init__(
        self,
        original: Graph,
        work: Path,
        lowered_as: Callable[[StepShape | None], Graph] | None = None,
        module: nn.Module | None = None,
        source_size: int | None = None,
    ) -> None:
        self.source_size = source_size  # bytes on disk
        self._original, self._work, self._module = original, work, module
        self.lowered_as = lowered_as or (lambda shape: self._original)
        self._runners: dict[str, Any] = {}
        self._onnx_runtime: tuple[str, Any] | None = (
            None  # the user's file as the user runs it, with its name
        )
        self.seconds: dict[StepShape | None, dict[str, dict[int, float]]] = {}  # of each form, by batch size
        self.judged_steps: set[StepShape] = set()  # as which the original was found to answer the same
        self._known: RememberedOutputs | None = None
        self._joining: Joining | None = None

    def named(self, outputs: tuple[TensorSpec, ...]) -> Graph:
        """Name the outputs of the original, which those of streamed weights get from what was captured of them; return
        its graph.
        """
        self._original = replace(self._original, outputs=outputs)
        return self._original

    def reference(self) -> RememberedOutputs:
        """Return the form that outputs are compared with; its outputs for earlier trials are cached."""
        if self._known is None:
            self._known = RememberedOutputs(self._called(), rounded(self._original, self._module, self._work))
        return self._known

    def window_logits(
        self, ids: Tensor, source: Mapping[str, Tensor] | None = None, rows: Sequence[int] | None = None
    ) -> Tensor:
        """Return the reference's logits [tokens, vocab] of one window of a language model, of `rows` where given."""
        inputs = {self._original.inputs[-1].name: ids[None]}
        inputs |= {key: value[None] for key, value in (source or {}).items()}
        return self.reference().run(inputs, rows)["logits"][0]

    @cached_property
    def row_seconds(self) -> float:
        """Seconds that one row of the samples takes in the reference, or the fewest rows that it takes together; 0 of
        language models, streamed weights, inputs without rows and models that fail on so few.
        """
        graph = self._original
        if (
            isinstance(graph, StreamedGraph)
            or graph.task == "text-generation"
            or not rows.have_rows(graph.inputs)
        ):
            return 0.0
        run, few = self.reference().form.run, graph.sizes.get(BATCH, (1, 1))[0]
        row = rows.cut(graph.inputs, graph.samples, 0, few)
        try:
            return latency.measure(lambda: run(row), min_seconds=0.0, min_runs=3).min / few
        except (InferError, MemoryError):
            raise
        except Exception:  # noqa: BLE001 - where this size is compared or timed, its failure is told
            return 0.0

    def joining(self, run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> Joining:
        """Return which requests of the original may share a batch, as tried once on its `run`."""
        if self._joining is None:
            graph = self._original
            self._joining = row_independence.joining(
                run,
                graph.inputs,
                graph.outputs,
                graph.samples,
                graph.sizes,
                row_seconds=self.row_seconds,
            )
        return self._joining

    def share_outputs(self, other: FloatReferences) -> None:
        """Take the cached outputs of the same original, prepared in another way."""
        self._known = other._known

    def share_seconds(self, other: FloatReferences) -> None:
        """Use and add to the seconds of the float forms of the same original, none of whose layers is changed."""
        self.seconds = other.seconds

    def keep_seconds(self, trial: Trial) -> None:
        """Keep the seconds of a timed trial of the unchanged model, as the form that others are timed against: its
        ratio to a form that is known.
        """
        if trial.latency and all(timing.rival in trial.forms for timing in trial.latency):
            known = self.seconds.setdefault(trial.shape, {})
            known.setdefault(f"{trial.backend}{FLOAT_FORM}", trial.typical)

    def _called(self) -> Any:
        """Open the original as its user calls it."""
        if isinstance(self._original, OpenvinoGraph):
            return self.runner(Plan(source=str(self._original.path), backend="openvino"))
        if self._original.file is not None:
            runner = onnx_runtime(self._original, "cpu", as_written=True)
            return runner if isinstance(self._original, OnnxGraph) else UserFileRunner(runner, self._original)
        if self._module is not None:
            return UserModuleRunner(self._module, self._original)
        return Eager(self._original)

    def forms(
        self,
        plan: Plan,
        backends: Sequence[str],
        shape: StepShape | None,
        step: Callable[[str, str], None],
        rivals: Collection[str] | None = None,
    ) -> tuple[dict[str, Any], list[Finding]]:
        """Return the runners of all float forms by name, and the reasons for those that failed.

        The original as the user runs it today, always; for a plan that changes numbers also lowered by each of
        `backends`, of `rivals` only where those are given, and those that were made for earlier trials.
        """
        if isinstance(self._original, StreamedGraph):
            return {f"{EAGER}, weights streamed": self._called()}, []
        forms, findings = dict([self._today(plan, shape)]), []
        opened_before = [
            name for name in plugins.names("backends") if self._key(name, shape) in self._runners
        ]
        wanted = [name for name in backends if rivals is None or name in rivals]
        for name in dict.fromkeys([*opened_before, *wanted]) if plan.changes_numbers else ():
            form = f"{name}{FLOAT_FORM}"
            if name == "ort" and self._onnx_runtime is not None:
                continue
            if self._key(name, shape) not in self._runners:
                step("lower", f"{name}, a float form to time against")
            try:
                forms[form] = self.runner(plan.with_(backend=name), shape)
            except Exception as error:  # noqa: BLE001 - whatever a library raises is its backend's refusal
                refusal = library_errors.as_backend_error(name, "lower", error, [])
                if not isinstance(refusal, NotUsableError | ResourceError):
                    raise
                findings.append(Finding("time", f"no {form}", None, why=str(refusal)))
        return forms, findings

    def runner(self, plan: Plan, shape: StepShape | None = None) -> Any:
        """Lower the unquantized graph on the plan's backend, once."""
        key = self._key(plan.backend, shape)
        if key not in self._runners:
            backend = plugins.get("backends", plan.backend)
            place = self._work / key
            place.mkdir(parents=True)
            graph = self.lowered_as(shape)
            storage.save(graph, place)
            float_plan = plan.with_(quant="none", dtype="float32", backend_options={})
            encoder_decoder_graphs.lower(backend, graph, float_plan, place)
            runner = encoder_decoder_graphs.open_runner(backend, place, plan.device)
            self._runners[key] = opened(runner, shape, plan.device)
        return self._runners[key]

    def adopt(self, backend: str, lowered: Path, shape: StepShape | None, device: str) -> None:
        """Open a folder that a trial of the unchanged model lowered, as that backend's float form."""
        key = self._key(backend, shape)
        if key not in self._runners:
            runner = encoder_decoder_graphs.open_runner(plugins.get("backends", backend), lowered, device)
            self._runners[key] = opened(runner, shape, device)

    def share(self, backend: str, runner: Any, shape: StepShape | None = None) -> None:
        """Use the open runner of a trial of the unchanged model as that backend's float form."""
        self._runners.setdefault(self._key(backend, shape), runner)

    def _today(self, plan: Plan, shape: StepShape | None) -> tuple[str, Any]:
        """Open the original as the user runs it today, with the name of that form."""
        if self._original.file is None:
            return EAGER, self._plain(plan, shape)
        if isinstance(self._original, OpenvinoGraph):
            return OPENVINO, self.runner(plan.with_(backend="openvino"))
        if self._onnx_runtime is None:
            try:
                self._onnx_runtime = ONNX_RUNTIME, onnx_runtime(self._original, plan.device)
            except NotUsableError:  # its optimizations refuse the graph
                as_written = onnx_runtime(self._original, plan.device, as_written=True)
                self._onnx_runtime = f"{ONNX_RUNTIME} without optimizations", as_written
        return self._onnx_runtime

    def _plain(self, plan: Plan, shape: StepShape | None) -> Any:
        """Open the original in plain torch on the plan's device: the user's own module where it runs on the CPU."""
        if plan.device != "cpu":
            return self.runner(plan.with_(backend="eager"), shape)
        if shape is not None:
            step = self.lowered_as(shape)
            runner: Any = Eager(step)
            if ENCODER in step.parts:
                runner = encoder_decoder_graphs.TwoGraphs(runner, Eager(step.parts[ENCODER]))
            return opened(runner, shape, plan.device)
        return (
            Eager(self._original) if self._module is None else UserModuleRunner(self._module, self._original)
        )

    def _key(self, backend: str, shape: StepShape | None) -> str:
        return f"float-{backend}" if shape is None else f"float-{backend}-step"


def takes(loaded: LoadedModel) -> InputTrials | None:
    """Return what runs a file, as it is written, on inputs that it may not take: in a process of its own."""
    runtime: Runtime = "openvino" if loaded.kind == "openvino" else "onnxruntime"
    if loaded.file is None or find_spec(runtime) is None:
        return None
    from ..onnx import ort_session
    from ..onnx.trial_process import TrialProcess

    names, outputs = [spec.name for spec in loaded.inputs], [spec.name for spec in loaded.meta["outputs"]]
    process = TrialProcess(loaded.file, runtime, outputs, torch.get_num_threads(), ort_session.LONGEST_CALL)

    def runs(inputs: Mapping[str, Tensor]) -> Mapping[str, Tensor] | None:
        arrays = {name: inputs[name].contiguous().numpy() for name in names}
        try:
            answer = process.run(arrays)
        except TimeoutError as error:
            raise ort_session.too_long(arrays, ort_session.LONGEST_CALL) from error
        if answer.failure is not None:
            ort_session.raise_memory_error(answer.failure)
            return None
        return {name: torch.from_numpy(a.unpacked()) for name, a in zip(outputs, answer.arrays, strict=True)}

    return InputTrials(runs, process.died_of, process.close)


def opened(runner: Any, shape: StepShape | None, device: str) -> Any:
    """Open a runner; of a step, one that runs whole windows."""
    if shape is None:
        return runner
    from ..llm.step import cuda_graphs
    from ..llm.step.encoder_decoder.encoder_decoder_runner import sequence_runner

    return sequence_runner(cuda_graphs.wrap(runner, device), shape, device)
