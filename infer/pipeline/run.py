"""One run down the street: what was asked, what was decided and found so far, and who watches."""

from __future__ import annotations

from dataclasses import dataclass, field

from .. import compress, plugins
from .. import device as hardware
from ..compress import assign
from ..errors import NotUsableError, UsageError, unknown
from ..llm.step.paged_step import StepShape
from ..option_values import TASKS
from ..plan import Plan
from ..results import BackendResult, ScoresOnly
from ..spec import Choice, Finding
from ..thresholds import default_kv_dtype

_WHY_KV = {
    "float32": "as exact as the float weights; float16 is half the traffic, 2e-4 to 2e-3 off",
    "float16": "half the traffic of float32, and its error is small beside that of the weights",
    "bfloat16": "half the traffic of float32 and as precise as the compute dtype",
}


class Watch:
    """What a person sees while it runs; the command line overrides it, the Python API stays silent."""

    def step(self, name: str, detail: str = "") -> None: ...

    def progress(self, done: int, total: int, what: str) -> None: ...

    def found(self, finding: Finding) -> None: ...


@dataclass
class Street:
    """The state of one run: everything found so far, in order."""

    plan: Plan
    watch: Watch
    asked: str = "auto"  # the backend
    choices: list[Choice] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    backends: list[BackendResult] = field(default_factory=list)
    step_shape: StepShape | None = None  # of a language model that will generate
    scores_only: ScoresOnly | None = None  # of one that will not

    def found(self, findings: list[Finding]) -> None:
        for finding in findings:
            self.findings.append(finding)
            self.watch.found(finding)

    def tried(self, result: BackendResult) -> None:
        self.backends.append(result)
        self.found([result.finding()])

    def step(self, name: str, detail: str = "") -> None:
        self.watch.step(name, detail)

    def progress(self, done: int, total: int, what: str) -> None:
        self.watch.progress(done, total, what)

    def again(self) -> None:
        """What a round found that another one will find anew."""
        self.findings = [
            f
            for f in self.findings
            if f.stage not in ("shrink", "layer", "lower", "backend", "compare", "time")
        ]
        self.backends.clear()
        self.choices = [c for c in self.choices if c.what != "backend"]


def resolve_plan_names(plan: Plan) -> Plan:
    """Unknown names, and options that exclude each other, fail before anything is loaded."""
    if plan.bits is not None and plan.max_drop is not None:
        raise UsageError("--bits and --max-drop are two budgets for one decision", hint="Give one of them")
    if plan.task not in TASKS:
        raise unknown("--task", plan.task, TASKS)
    if plan.layers and plan.quant == "none" and plan.bits is None and plan.max_drop is None:
        raise UsageError("--layer says what differs from --quant", hint="Give --quant as well")
    if (largest := max(plan.batches, default=1)) > plan.max_batch:
        raise UsageError(f"--batch {largest} is larger than --max-batch {plan.max_batch}")
    compress.check_pins(plan.layers, plan)
    if plan.backend != "auto":
        plugins.get("backends", plan.backend)
    if plan.quant != "none":
        compress.check_option(plugins.get("infer.compress.formats", plan.quant_name), plan)
    return plan


def resolve(street: Street) -> None:
    """Turn every "auto" into a value and a reason, once."""
    plan = street.plan
    device = hardware.resolve(plan.device)
    street.choices.append(device)
    if plan.dtype == "auto":
        dtype = "float32" if device.value == "cpu" else "bfloat16"
        why = "CPUs without half-precision units are slower in it" if dtype == "float32" else "tensor cores"
        street.choices.append(Choice("dtype", "auto", dtype, why))
    else:
        dtype = plan.dtype
    hardware.use_tf32(dtype, device.value)
    street.plan = plan = plan.with_(device=device.value, dtype=dtype)
    street.asked = plan.backend
    if plan.quant == "none" and (plan.bits is not None or plan.max_drop is not None):
        least = assign.smallest(plan.bits)
        street.choices.append(Choice("quant", "none", least, "the smallest format that the budget may use"))
        street.plan = plan = plan.with_(quant=least)
    if plan.kv_dtype == "auto":
        kv = default_kv_dtype(plan)
        street.choices.append(Choice("kv_dtype", "auto", kv, _WHY_KV[kv]))
        street.plan = plan = plan.with_(kv_dtype=kv)
    if plan.backend == "trt" and plan.quant == "int8":
        why = "TensorRT computes int8 only with calibrated scales"
        street.choices.append(Choice("quant", "int8", "int8:static", why))
        street.plan = plan = plan.with_(quant="int8:static")
    if plan.backend != "auto" and (reason := plugins.why_not("backends", plan.backend)):
        other = "inductor" if plan.backend != "inductor" else "eager"
        raise NotUsableError(
            f"backend {plan.backend} is not usable on this machine: {reason}",
            hint=f"Use --backend {other}, or run 'infer doctor'",
        )
    if (limited := hardware.fit_threads(plan.threads)) is not None:
        street.found([limited])
