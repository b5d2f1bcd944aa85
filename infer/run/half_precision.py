"""Unquantized trials in bfloat16, beside those in float32: for `--dtype auto` on CPUs with units for it.

bfloat16 is a candidate like a backend: judged by the limits of its own precision class, timed in turns with the fastest
float32 form, and published where `select` finds that it pays. OpenVINO computes in it by default on such CPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import plugins
from ..errors import InferError
from ..graph import storage
from ..plan import Plan
from ..report.rendering import formatting
from ..spec import Choice
from .float_graph import Original
from .resolve_plan import Resolved
from .select import Selected
from .trial_timing import HOPELESS
from .try_backends import Compressed, Trials, candidates

DTYPE = "bfloat16"
LEAST_SECONDS = (
    5e-3  # of the fastest float32 trial, summed over the batch sizes: a shorter call gains too little
)


@dataclass(frozen=True)
class HalfPrecision:
    """Trial of bfloat16 beside float32, where that was to be chosen here (`--dtype auto`), else `refused`
    says why it is not; neither where there was nothing to choose.
    """

    is_tried: bool = False
    refused: str = ""


def choice(resolved: Resolved, original: Original) -> HalfPrecision:
    """Return whether bfloat16 is tried: nothing is chosen where a dtype was asked for, or no backend has bfloat16 units
    here.
    """
    plan = resolved.plan
    if (
        plan.dtype != "float32"
        or not any(c.what == "dtype" for c in resolved.choices)
        or plan.device != "cpu"
    ):
        return HalfPrecision()
    if not any(_takes(name) for name in plugins.names("backends") if plan.backend in ("auto", name)):
        return HalfPrecision()
    refused = ""
    if plan.backend != "auto":
        refused = "bfloat16 is tried with --backend auto only"
    elif plan.quant != "none":
        refused = "float layers beside quantized ones keep float32"
    elif original.loaded.task == "text-generation":
        refused = "--dtype bf16 changes the KV cache of a language model, too"
    elif not original.is_in_memory:
        refused = "bfloat16 needs a captured program with its weights in memory"
    elif not plan.batches:
        refused = "bfloat16 is not tried where nothing is timed"
    return HalfPrecision(not refused, refused)


def try_half(tried: Trials, compress: Callable[[Plan], Compressed]) -> None:
    """Add trials in bfloat16 to `tried`, or the reasons that refuse them.

    `compress` captures the model in the dtype of a plan. Of the backends with bfloat16 units those are tried whose
    float32 trial took at most `HOPELESS` times the fastest one.
    """
    plan, place = tried.plan.with_(dtype=DTYPE), tried.folder / "trials" / DTYPE
    half = replace(tried, plan=plan, folder=place, trials=[], refused=[], dtype=DTYPE)
    took = {trial.backend: trial.seconds for trial in tried.trials if trial.latency}
    if not took:
        return
    fastest = min(took.values())
    if fastest < LEAST_SECONDS:
        half.refuse("", f"calls of {formatting.seconds(fastest)} are too short to gain by it")
    else:
        names = [n for n in candidates(plan) if _takes(n) and took.get(n, 0.0) <= HOPELESS * fastest]
        for trial in tried.trials:
            tried.floats.share(trial.backend, trial.runner)
        _run(half, names, compress)
    tried.trials += half.trials
    tried.refused += half.refused


def _run(half: Trials, names: Sequence[str], compress: Callable[[Plan], Compressed]) -> None:
    half.reporter.step("capture", DTYPE)
    try:
        half.small = compress(half.plan)
        half.folder.mkdir(parents=True)
        storage.save(half.small.graph, half.folder)
    except InferError as error:
        half.refuse("", str(error))
        return
    for name in names:
        half.run(name)
    half.time()


def chosen_dtype(resolved: Resolved, selected: Selected, half: HalfPrecision) -> Resolved:
    """Return the plan with the dtype of the selected trial, and the reason for it where there was a choice."""
    if half == HalfPrecision():
        return resolved
    value = selected.trial.dtype or resolved.plan.dtype
    why = selected.dtype
    if not selected.trial.dtype:
        why = f"as exact as the original; {half.refused or selected.dtype}"
    choices = tuple(
        Choice("dtype", choice.asked, value, why) if choice.what == "dtype" else choice
        for choice in resolved.choices
    )
    return replace(resolved, plan=resolved.plan.with_(dtype=value), choices=choices)


def _takes(backend: str) -> bool:
    """Return true if a backend is usable here and computes in bfloat16 with units of this CPU."""
    searched = getattr(plugins.get("backends", backend), "searched_dtypes", tuple)
    return plugins.why_not("backends", backend) is None and DTYPE in searched()
