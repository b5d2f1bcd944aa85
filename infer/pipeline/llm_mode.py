"""Decide once, right after loading, whether a language model will be a step that generates, or scores whole windows."""

from __future__ import annotations

from .. import llm, load, plugins
from ..errors import NotUsableError, UsageError
from ..llm.step.paged_step import StepShape
from ..load.hf_wrappers import Decoder
from ..option_values import parse_adapters
from ..plan import Plan
from ..results import ScoresOnly
from ..spec import Finding
from .run import Street

_ANOTHER = "Without --task generate the artifact is made and scores text only"


def refuse_backend(plan: Plan) -> None:
    """Raise `NotUsableError` when `--task generate` is asked of a backend that can't run a step."""
    if plan.task != "generate" or plan.backend == "auto":
        return
    if not plugins.get("backends", plan.backend).STEPS:
        able = [name for name in plugins.names("backends") if plugins.get("backends", name).STEPS]
        raise NotUsableError(
            f"backend {plan.backend} has no attention over a paged KV cache and can't generate",
            hint=f"Use --backend {', '.join(able[:-1])} or {able[-1]}. {_ANOTHER}",
        )


def find_step(street: Street, loaded: load.LoadedModel) -> None:
    """Set `street.step_shape`, or `street.scores_only` to the reason why there is none.

    With `--task generate` that reason is a `NotUsableError`, before anything is quantized or compiled.
    """
    plan, module = street.plan, loaded.module
    if loaded.task != "text-generation":
        if plan.task != "auto":
            raise UsageError(
                f"--task {plan.task} is for language models, the task of this one is {loaded.task}"
            )
        return
    try:
        street.step_shape = _probed(plan, loaded)
        if plan.task == "generate" and isinstance(module, Decoder):
            street.watch.step("capture", "the step of the float original")
            llm.capture_step(module.model, street.step_shape)
    except NotUsableError as error:
        no_step(street, str(error))
    else:
        adapters = street.step_shape.adapters
        street.found([street.step_shape.finding(), *(adapters.findings() if adapters is not None else ())])


def _probed(plan: Plan, loaded: load.LoadedModel) -> StepShape:
    if plan.task == "score":
        raise NotUsableError("asked for by --task score")
    if not isinstance(loaded.module, Decoder):
        raise NotUsableError("only decoders of transformers can be run over a paged KV cache")
    # Streamed weights are read from disk at each forward: the schedules of the lowered form judge them.
    shape = llm.probe(loaded.module.model, kv_dtype=plan.kv_dtype, run_chunks=loaded.load != "offload")
    return (
        llm.with_adapters(loaded.module.model, shape, *parse_adapters(plan.adapters))
        if plan.adapters
        else shape
    )


def no_step(street: Street, reason: str) -> None:
    """Note that the artifact will score text only; raise instead where it must generate."""
    if street.plan.task == "generate":
        raise NotUsableError(f"this model can't generate: {reason}", hint=_ANOTHER)
    street.step_shape, street.scores_only = None, ScoresOnly(reason, by_model=True)
    street.found([Finding("capture", "generation", False, why=reason)])
