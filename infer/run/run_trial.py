"""A trial: a graph lowered by one backend and compared with the float original on its samples."""

from __future__ import annotations

import gc
import itertools
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from torch import Tensor

from .. import carried_state, fidelity, library_errors, plugins, rows
from ..artifact import golden
from ..coverage import enforce
from ..errors import NotUsableError, ResourceError
from ..fidelity import batch_sizes, extreme_values, input_rounding
from ..fidelity.thresholds import LIMITS, limits, precision
from ..graph import encoder_decoder_graphs, row_independence, storage
from ..graph.agreement import at_extremes
from ..graph.program import Graph, StreamedGraph, TorchGraph
from ..graph.row_independence import Joining
from ..graph.typical_inputs import without_common_padding
from ..llm.step.full_sequence_runner import FullSequenceRunner
from ..llm.step.step_shape import StepShape
from ..plan import INVENTED, Plan
from ..report.measurements import roofline
from ..report.rendering import formatting
from ..results import Metric
from ..spec import BATCH, UNBOUNDED, TensorSpec
from .float_reference import FloatReferences, opened
from .remembered_outputs import RememberedOutputs
from .trial import Trial

CALLS, LAST_CALLS = 40, 8  # with a carried state; the last ones are compared
MAX_ROWS = 256  # of the samples are compared; more buy no certainty worth their time
BEYOND_ROUNDING = "beyond what rounding does in the original"
TOGETHER = 8  # rows in one call of a comparison, which is made once at least
# Of the original on rows of ours: more of them say nothing new where nothing is rounded, and little where formats are.
INVENTED_SECONDS, INVENTED_FORMAT_SECONDS = 1.0, 12.0
INVENTED_TOKENS = 2048  # of texts of ours: a change of perplexity by one percent is 3.5 standard errors


class BehindError(NotUsableError):
    """A backend takes far longer than one that is faithful: it is not compared."""


def run_trial(
    plan: Plan,
    original: Graph,
    small: Graph,
    folder: Path,
    work: Path,
    step: Callable[[str, str], None],
    floats: FloatReferences | None = None,
    shape: StepShape | None = None,
    behind: Callable[[Any], str] = lambda runner: "",
) -> Trial:
    """Lower `small` into `work/small` and compare it with `original` on its samples; `trial_timing` times it.

    With `shape`, `small` is the step of a language model: whole windows are compared.
    `floats` keeps the float forms for the next trial of the same original. `behind` returns why a runner can't win, ""
    where it may; raises `BehindError` with that reason.
    """
    floats = floats or FloatReferences(original, work)
    backend = plugins.get("backends", plan.backend)
    ours = lowering_folder(folder, work / "small")
    lowered = encoder_decoder_graphs.lower(backend, small, plan, ours)
    findings, quantized = lowered.findings, ""
    if lowered.coverage is not None:
        enforce(lowered.coverage, plan)
        findings, quantized = [*findings, *lowered.coverage.findings()], lowered.coverage.verdict()
    runner = opened(encoder_decoder_graphs.open_runner(backend, ours, plan.device), shape, plan.device)
    if why := behind(runner):
        runner.close()
        raise BehindError(why)
    step("compare", plan.backend)
    reference = floats.reference()
    most = _most_rows(plan, floats, original)
    compared, kept, dead, rounding = _compare(
        plan, reference, runner, original, () if shape else small.outputs, most, floats.row_seconds
    )
    if isinstance(runner, FullSequenceRunner):
        compared += _judge_schedules(floats, runner, original, small)
    wrong = fidelity.violated(compared, limits(plan, original.task), plan.max_error)
    size = published_size(backend, folder, ours)
    trial = Trial(
        backend=plan.backend,
        folder=ours,
        fidelity=compared,
        golden=kept,
        size=size,
        source_size=floats.source_size,
        reads=roofline.bytes_read(small.program) if isinstance(small, TorchGraph) else size,
        changed=plan.changes_numbers,
        findings=findings,
        quantized=quantized,
        more_exact=lowered.more_exact,
        runner=runner,
        task=original.task,
        shape=shape,
        backend_options=plan.backend_options,
        ended=wrong or "",
        compared=_compared(most, floats, original),
        rounding=rounding,
        untested=_untested(plan, dead),
        ahead_of_time=plugins.ahead_of_time(backend),
    )
    gc.collect()
    return trial


def is_faithful(plan: Plan, name: str, floats: FloatReferences, original: Graph) -> bool:
    """Return whether the unquantized form of a backend, lowered for timing, would pass the gate of fidelity."""
    float_plan = plan.with_(backend=name, quant="none", dtype="float32")
    try:
        compared, *_ = _compare(
            float_plan, floats.reference(), floats.runner(float_plan), original, original.outputs
        )
    except (NotUsableError, ResourceError):
        return False
    return fidelity.judge(compared, limits(float_plan, original.task), plan.max_error) is None


def _judge_schedules(
    floats: FloatReferences, runner: FullSequenceRunner, original: Graph, small: Graph
) -> list[Metric]:
    from ..llm.step.schedules import schedule_consistency as schedules

    longest = min(runner.shape.max_positions, original.sizes.get("seq", (1, UNBOUNDED))[1])
    source, name, vocabulary = runner.shape.source, runner.inputs[-1].name, runner.shape.vocab_size
    windows = schedules.judged_windows(original.samples[name], vocabulary, longest)
    late = schedules.late_window(original.samples[name], vocabulary, longest, original.weights)
    sources = () if source is None else schedules.judged_sources(source, original.samples)
    spared = schedules.spared_tokens(small)
    return schedules.compare_schedules(
        runner, windows, floats.window_logits, late=late, spared=spared, sources=sources
    )


def joining(plan: Plan, floats: FloatReferences, runner: Any, original: Graph) -> Joining:
    """Return which requests may share a batch: those that neither the original nor the optimized form mixes.

    Sequences of a language model's engine share steps, which its schedules are judged by, and no batch.
    """
    if isinstance(runner, FullSequenceRunner):
        return Joining("padded")
    with library_errors.float_model_errors():
        of_original = floats.joining(floats.reference().run)
    if of_original.joins == "none":
        return of_original
    allowed = row_independence.of_class(LIMITS[precision(plan)].relative_error or 0.0)
    candidate = row_independence.joining(
        *(runner.run, original.inputs, original.outputs, original.samples, original.sizes, allowed),
        row_seconds=floats.row_seconds,
    )
    return candidate if candidate.joins == "none" or of_original.joins == "padded" else of_original


def published_size(backend: Any, folder: Path, ours: Path) -> int:
    """Bytes of the compiled form, plus graph and weights unless it contains them."""
    parts = [ours / "compiled", ours / storage.ENCODER / "compiled"]
    if not backend.PORTABLE:
        graphs = (folder, folder / storage.ENCODER)
        parts += [place / name for place in graphs for name in ("weights", storage.PROGRAM)]
    files = [f for part in parts for f in (part.rglob("*") if part.is_dir() else [part])]
    return sum(f.stat().st_size for f in files if f.is_file())


def lowering_folder(source: Path, place: Path) -> Path:
    """Make a folder to lower in that shares the graph and the weights of `source` by links."""
    shutil.rmtree(place, ignore_errors=True)  # of an attempt before layers rose, which was refused or left
    place.mkdir(parents=True)
    for target, link in encoder_decoder_graphs.links(source, place):
        if target.exists():
            link.symlink_to(target.resolve())
    return place


def batches_of(graph: Graph, size: int) -> Iterator[dict[str, Tensor]]:
    """Return the samples, at most `MAX_ROWS` of them, in batches of at most `size` rows."""
    step = graph.multiples.get(BATCH, 1)
    size, count = max(size // step, 1) * step, min(rows.count(graph.inputs, graph.samples), MAX_ROWS)
    for start in range(0, count // step * step, size):
        yield rows.cut(graph.inputs, graph.samples, start, start + size)


def _compare(
    plan: Plan,
    reference: RememberedOutputs,
    runner: Any,
    graph: Graph,
    outputs: Sequence[TensorSpec],
    most: int = MAX_ROWS,
    row_seconds: float = 0.0,
) -> tuple[list[Metric], dict[str, dict[str, Tensor]], list[str], str]:
    """Compare both runners over the samples; the first rows become the golden inputs and outputs.

    `outputs`: those that the artifact declares, whose dtypes are its contract. Returns also the outputs that are the
    same for every row, and the sentence on a limit that is kept only beyond what rounding of the inputs does in the
    original (`input_rounding`), which is tried where nothing changes the numbers of the model. `row_seconds`: what a
    row is known to take in the reference.
    """
    kept: dict[str, dict[str, Tensor]] = {}
    usual: dict[str, float] = {}
    wrong: list[Metric] = []
    together = min(TOGETHER, graph.sizes.get(BATCH, (1, TOGETHER))[1])
    is_exact = not (plan.changes_numbers or isinstance(runner, FullSequenceRunner))
    run, rounding = runner.run, ""

    def over_rows() -> fidelity.Comparison:
        nonlocal kept, usual, wrong
        comparison = fidelity.Comparison(graph.task, integers=weightless_outputs(graph, plan.dtype))
        for inputs in itertools.islice(batches_of(graph, together), -(-most // together)):
            with library_errors.float_model_errors(inputs):
                expected = reference.run(inputs)
            got = run(inputs)
            expected = {name: value.cpu() for name, value in expected.items()}
            got = {name: value.cpu() for name, value in got.items()}
            comparison.add(expected, got, inputs)
            if not kept:
                kept = _golden_rows(plan, reference, runner, graph, inputs)
                usual = batch_sizes.root_mean_squares(expected)
                wrong = _other_dtypes(outputs, got)
        return comparison

    def violated(metrics: Sequence[Metric]) -> str | None:
        return fidelity.violated(metrics, limits(plan, graph.task), plan.max_error)

    comparison = over_rows()
    metrics = [*wrong, *comparison.metrics()]
    if is_exact and not wrong and (reason := violated(metrics)):
        run = input_rounding.beyond_rounding(reference.run, runner.run, graph.inputs, reference.rounded)
        beyond = over_rows()
        if violated(beyond.metrics()) is None:
            comparison, metrics = beyond, beyond.metrics()
            rounding = f"differences that rounding makes in the original too do not count: {reason}"
    if violated(metrics) is None:
        metrics += _at_sizes(
            reference, runner, run, graph, usual, comparison, most, rounded=plan.changes_numbers
        )
        metrics += _carried(reference, runner, graph, usual, comparison)
        if is_exact:
            metrics += _at_values(reference, runner, graph, usual, comparison, row_seconds)
    return metrics, kept, comparison.constant_outputs(), rounding


def _most_rows(plan: Plan, floats: FloatReferences, original: Graph) -> int:
    """Return how many rows are compared: `MAX_ROWS`; of rows of ours fewer where more say nothing new: as many as hold
    `INVENTED_TOKENS`, and of a slow model those that fit `INVENTED_SECONDS`, or those of formats.
    """
    if plan.data not in INVENTED:
        return MAX_ROWS
    if original.task == "text-generation":
        tokens = max(int(original.samples[s.name].shape[-1]) for s in original.inputs if s.shape)
        fitting = max(INVENTED_TOKENS // max(tokens, 1), 1)
    else:
        seconds = INVENTED_FORMAT_SECONDS if plan.changes_numbers else INVENTED_SECONDS
        fitting = int(seconds / max(floats.row_seconds, 1e-9))
    return max(min(fitting, MAX_ROWS) // TOGETHER, 1) * TOGETHER


def _compared(most: int, floats: FloatReferences, original: Graph) -> str:
    """Say on how many rows a slow model was compared, where it has or takes more; "" of any other."""
    count, largest = rows.count(original.inputs, original.samples), original.sizes.get(BATCH, (1, 1))[1]
    if original.task == "text-generation" or most >= min(max(count, largest), MAX_ROWS):
        return ""
    took = formatting.seconds(floats.row_seconds)
    return (
        f"compared on {min(most, count)} rows, in batches of {most} at most: one takes {took} in the original"
    )


def _untested(plan: Plan, constant: Sequence[str]) -> str:
    """Say which outputs of a quantized model nothing is known of, where rows of ours do not make them change."""
    if not constant or plan.data not in INVENTED or not plan.changes_numbers:
        return ""
    several = len(constant) > 1
    which = f"output{'s' if several else ''} {', '.join(constant[:4])} {'are' if several else 'is'}"
    return f"{which} the same for all inputs of ours, so that nothing is known of the loss: give --data"


def _other_dtypes(outputs: Sequence[TensorSpec], got: Mapping[str, Tensor]) -> list[Metric]:
    """Return a metric for each output of another dtype than the artifact declares."""
    dtypes = [(spec, got[spec.name].dtype) for spec in outputs if spec.name in got]
    return [
        Metric(
            spec.name,
            "dtype",
            False,
            detail=f"expected {spec.dtype}, got {str(dtype).removeprefix('torch.')}",
        )
        for spec, dtype in dtypes
        if dtype != spec.torch_dtype
    ]


def _at_sizes(
    reference: RememberedOutputs,
    runner: Any,
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]],
    graph: Graph,
    usual: Mapping[str, float],
    whole: fidelity.Comparison,
    most: int = MAX_ROWS,
    *,
    rounded: bool = False,
) -> list[Metric]:
    """Compare at small batches and the largest, without common padding, and at both ends of every length; `run` is what
    answers for the runner.

    Fewer rows where `most` allows no more, but not of what a format has `rounded`: its error on one row says little.
    Steps of a language model have schedules instead.
    """
    if isinstance(runner, FullSequenceRunner) or not rows.have_rows(graph.inputs):
        return []
    low, high = graph.sizes.get("batch", (1, 1))
    one_size = isinstance(graph, StreamedGraph) or graph.task == "text-generation"
    least = 1 if one_size or (most < MAX_ROWS and not rounded) else batch_sizes.ROWS
    metrics: list[Metric] = []
    largest = () if one_size or most == TOGETHER else (max(low, min(high, most)),)

    def compare(where: str, batches: Iterable[Mapping[str, Tensor]]) -> list[Metric]:
        return batch_sizes.compare_size(
            where, batches, reference.run, run, graph.task, usual, whole.of_other_rows()
        )

    for size in dict.fromkeys((*batch_sizes.SIZES, *largest)):
        if low <= size <= high:
            batches = itertools.islice(batches_of(graph, size), -(-least // size))
            full = ({s.name: s.with_rows(batch[s.name], size) for s in graph.inputs} for batch in batches)
            shorter = (without_common_padding(batch, graph.inputs, graph.sizes) for batch in full)
            metrics += compare(f"batch {size}", shorter)
    if not one_size:
        for size_name, length, inputs in at_extremes(graph):
            metrics += compare(f"{size_name} {length}", [inputs])
    return metrics


def _carried(
    reference: Any, runner: Any, graph: Graph, usual: Mapping[str, float], whole: fidelity.Comparison
) -> list[Metric]:
    """Compare the last of many calls, each of which is given the state that the call before returned."""
    pairs = carried_state.states(graph.inputs, graph.outputs)
    if isinstance(runner, FullSequenceRunner) or not pairs:
        return []
    fewest = graph.sizes.get(BATCH, (1, 1))[0]
    first = {s.name: s.with_rows(graph.samples[s.name], fewest) for s in graph.inputs}
    calls = [carried_state.shifted(graph.inputs, first, graph.samples, number) for number in range(CALLS)]
    runs = [carried_state.Carrying(side.run, pairs) for side in (reference, runner)]
    with library_errors.float_model_errors():
        for inputs in calls[:-LAST_CALLS]:
            runs[0](inputs)
    for inputs in calls[:-LAST_CALLS]:
        runs[1](inputs)
    return batch_sizes.compare_size(
        f"call {CALLS}", calls[-LAST_CALLS:], runs[0], runs[1], graph.task, usual, whole.of_other_rows()
    )


def _at_values(
    reference: RememberedOutputs,
    runner: Any,
    graph: Graph,
    usual: Mapping[str, float],
    whole: fidelity.Comparison,
    row_seconds: float,
) -> list[Metric]:
    """Compare at values that the samples do not hold, where no format explains a difference; the metrics say that they
    are of what lies beyond rounding in the original.
    """
    if isinstance(runner, FullSequenceRunner) or isinstance(graph, StreamedGraph):
        return []
    metrics: list[Metric] = []
    places = extreme_values.places(
        graph.inputs,
        graph.samples,
        graph.sizes,
        graph.multiples,
        reference.run,
        runner.run,
        reference.rounded,
        row_seconds=row_seconds,
    )
    for where, inputs, run in places:
        metrics += batch_sizes.compare_size(
            where, [inputs], reference.run, run, graph.task, usual, whole.of_other_rows()
        )
    measured = ("relative_error", "worst_slice_error")
    return [
        replace(metric, detail=f"{metric.detail}; {BEYOND_ROUNDING}") if metric.name in measured else metric
        for metric in metrics
    ]


def weightless_outputs(graph: Graph, dtype: str) -> frozenset[str]:
    """Name the outputs that nothing rounds, so that their integers stay: no float weight reaches them, and no float of
    any kind where a coarser `dtype` computes.
    """
    if not isinstance(graph, TorchGraph):
        return frozenset()
    signature = graph.program.graph_signature
    weights = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    rounded: set[str] = set()
    for node in graph.nodes:
        value = node.meta.get("val")
        is_float = not isinstance(value, Tensor) or value.is_floating_point()
        begins = is_float and node.op != "output" and (node.name in weights or dtype != "float32")
        if begins or node.op == "get_attr" or any(n.name in rounded for n in node.all_input_nodes):
            rounded.add(node.name)
    pairs = zip(graph.outputs, signature.user_outputs, strict=False)
    return frozenset(spec.name for spec, node in pairs if isinstance(node, str) and node not in rounded)


def _golden_rows(
    plan: Plan, reference: Any, runner: Any, graph: Graph, inputs: Mapping[str, Tensor]
) -> dict[str, dict[str, Tensor]]:
    """Return two rows with their outputs as golden data; synthetic rows where the plan stores no user data."""
    width = graph.outputs[0].shape[-1] if graph.task == "text-generation" and graph.outputs else 2
    return golden.record(
        reference,
        runner,
        graph.inputs,
        inputs,
        task=graph.task,
        synthetic=not plan.golden,
        vocabulary=width if isinstance(width, int) else 2,
        seed=plan.seed,
        least=graph.sizes.get(BATCH, (1, 1))[0],
    )
