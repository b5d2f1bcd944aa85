"""The plan of one run: options that exclude each other are refused, every "auto" becomes a value and a reason."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .. import compress, plugins
from .. import device as hardware
from ..compress import assign
from ..errors import NotUsableError, UsageError, unknown
from ..fidelity.thresholds import default_kv_dtype
from ..options import checked
from ..options.values import TASKS
from ..plan import Plan
from ..reporter import Reporter
from ..spec import Choice

DECODED = "float"  # the --quant that decodes a quantized source
_WHY_KV = {
    "float32": "as exact as the float weights; float16 is half the traffic, 2e-4 to 2e-3 off",
    "float16": "half the traffic of float32, and its error is small beside that of the weights",
    "bfloat16": "half the traffic of float32 and as precise as the compute dtype",
}


_WHY_FLOAT32 = {  # by bfloat16 units
    True: "as exact as the original; --dtype bf16 uses the bfloat16 units of this CPU",
    False: "CPUs without half-precision units are slower in it",
}


@dataclass(frozen=True)
class Resolved:
    """A plan without "auto" but the backend, which the trials decide, and the reasons of what was chosen."""

    plan: Plan
    choices: tuple[Choice, ...] = ()

    def choose(self, field: str, value: str, reason: str) -> Resolved:
        """Set a field of the plan to a resolved value and record the reason."""
        choice = Choice(field, str(getattr(self.plan, field)), value, reason)
        return replace(self, plan=self.plan.with_(**{field: value}), choices=(*self.choices, choice))


def check_plan(plan: Plan) -> Plan:
    """Return the plan with canonical values; raise `UsageError` for wrong ones before anything is loaded."""
    plan = checked(plan)
    if plan.bits is not None and plan.max_drop is not None:
        raise UsageError("--bits and --max-drop are two budgets for one decision", hint="Give one of them")
    if (
        plan.recover
        and plan.quant in ("none", DECODED, "keep")
        and plan.bits is None
        and plan.max_drop is None
    ):
        raise UsageError(
            "--recover trains a quantized model, and no format was given", hint="Give --quant as well"
        )
    if plan.recover:
        from ..tune.training_environment import missing

        if reason := missing():
            raise NotUsableError(reason, hint="Install the extra tune, or leave out --recover")
    if plan.task not in TASKS:
        raise unknown("--task", plan.task, TASKS)
    if plan.layers and plan.quant == "none" and plan.bits is None and plan.max_drop is None:
        raise UsageError(
            "--layer changes single layers, and no format was given",
            hint="Give --quant as well",
        )
    if (largest := max(plan.batches, default=1)) > plan.max_batch:
        raise UsageError(f"--batch {largest} is larger than --max-batch {plan.max_batch}")
    compress.check_pins(plan.layers, plan)
    if plan.backend != "auto":
        plugins.check_options(plan.backend, plugins.get("backends", plan.backend), plan.backend_options)
    elif plan.backend_options:
        raise UsageError("--backend-option is for one backend", hint="Give --backend as well")
    if plan.quant not in ("none", DECODED):
        compress.check_option(plugins.get("infer.compress.formats", plan.quant_name), plan)
    return plan


ANOTHER_TASK = "Without --task generate the artifact is made and scores text only"


def refuse_backend(plan: Plan) -> None:
    """Raise `NotUsableError` when `--task generate` is asked of a backend that can't run a step."""
    if plan.task != "generate" or plan.backend == "auto":
        return
    if not plugins.get("backends", plan.backend).STEPS:
        able = [name for name in plugins.names("backends") if plugins.get("backends", name).STEPS]
        raise NotUsableError(
            f"backend {plan.backend} has no attention over a paged KV cache and can't generate",
            hint=f"Use --backend {', '.join(able[:-1])} or {able[-1]}. {ANOTHER_TASK}",
        )


def resolve(plan: Plan, reporter: Reporter | None = None) -> Resolved:
    """Check the plan and turn every "auto" that needs no model into a value and a reason.

    Raises `UsageError` for a wrong plan, `NotUsableError` for a backend that this machine can't run.
    """
    plan = check_plan(plan)
    device = hardware.resolve(plan.device)
    run = Resolved(plan.with_(device=device.value), (device,))
    ahead = plan.backend != "auto" and plugins.ahead_of_time(plugins.get("backends", plan.backend))
    if ahead and not plan.allow_slower:  # layers too would be timed on a machine that never runs them
        run = replace(run, plan=run.plan.with_(allow_slower=True))
    if plan.dtype == "auto":
        dtype = "float32" if device.value == "cpu" and not ahead else "bfloat16"
        why = _WHY_FLOAT32[hardware.has_bfloat16()] if dtype == "float32" else "tensor cores"
        run = run.choose("dtype", dtype, why)
    hardware.use_tf32(run.plan.dtype, device.value)
    if plan.quant == "none" and (plan.bits is not None or plan.max_drop is not None):
        least = assign.smallest_format(plan.bits)
        run = run.choose("quant", least, "the smallest format that the budget may use")
    if plan.quant == DECODED:
        run = run.choose("quant", "none", "codes of the source are decoded to float")
    if plan.backend != "auto":
        instead = getattr(plugins.get("backends", plan.backend), "INSTEAD", {})
        if run.plan.quant in instead:
            run = run.choose("quant", *instead[run.plan.quant])
    if plan.backend != "auto" and (reason := plugins.why_not("backends", plan.backend)):
        other = "inductor" if plan.backend != "inductor" else "eager"
        if plan.source.endswith(".onnx"):
            other = "auto"  # those two need a torch program
        raise NotUsableError(
            f"backend {plan.backend} is not usable on this machine: {reason}",
            hint=f"Use --backend {other}, or run 'infer doctor'",
        )
    if (limited := hardware.fit_threads(plan.threads)) is not None and reporter is not None:
        reporter.found([limited])
    return run


def keep_codes(run: Resolved, stored_as: str) -> Resolved:
    """Choose `keep` for a quantized source where no format was asked for and the backend has operators for it."""
    plan = run.plan
    asked = {choice.asked for choice in run.choices if choice.what == "quant"}
    if not stored_as or plan.quant != "none" or asked:
        return run
    if plan.backend != "auto" and not getattr(plugins.get("backends", plan.backend), "CODES", True):
        why = f"backend {plan.backend} has no operators for the codes of the source ({stored_as}): they are decoded"
        return run.choose("quant", "none", why)
    why = f"the source is quantized ({stored_as}): its codes are carried over; --quant float decodes them"
    return run.choose("quant", "keep", why)


def resolve_cache(run: Resolved, task: str) -> Resolved:
    """Choose the KV cache dtype of a language model; raise for other models where one was requested.

    Raises `UsageError` when something was.
    """
    plan = run.plan
    if task != "text-generation":
        if plan.kv_dtype != "auto" or plan.chat_template is not None:
            raise UsageError(
                f"--kv-dtype and --chat-template are for language models, the task of this one is {task}"
            )
        return run
    if plan.kv_dtype != "auto":
        return run
    dtype = default_kv_dtype(plan)
    return run.choose("kv_dtype", dtype, _WHY_KV[dtype])
