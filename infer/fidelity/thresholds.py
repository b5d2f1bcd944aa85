"""Fidelity thresholds by precision class: what the gate allows for a plan."""

from __future__ import annotations

import msgspec

from .. import plugins
from ..errors import UsageError
from ..plan import OURS, Plan

FORMATS = "infer.compress.formats"

# Judged by the best class of each row: of a text, token, image, pixel, frame, query or, of a span, its first and last.
TOP1_TASKS = (
    "classification",
    "token-classification",
    "question-answering",
    "fill-mask",
    "multiple-choice",
    "zero-shot-image-classification",
    "image-classification",
    "image-segmentation",
    "object-detection",
    "audio-classification",
    "audio-frame-classification",
    "automatic-speech-recognition",
    "video-classification",
    "time-series-classification",
)

# Of language models whose products round activations to 8 bits. The best of 50,000 words is often a near tie, and small
# models answer for it with their perplexity: SmolLM2-135M on its exact weights, activations rounded in groups of 32 as
# llama.cpp and our kernels do (of 64, as for weights with such groups), keeps 96.8 (95.5) % of the best words at a
# divergence of .0038 (.0071); its perplexity grows by .6 (.3 to 1) %, and the worst of 2,000 tokens (`worst_row`) lies
# .42 (.70) of its deviation away.
GENERATION = {"int8": {"top1": 0.92, "kl": 0.015, "perplexity": 0.02, "worst_row": 1.2}}
OURS_SHARE = 0.75  # of the errors allowed, where the inputs are not the user's
SLICE_ROOM = (
    2.0  # what --max-drop allows the worst slice, in units of its deviation, of the error of the whole
)


class Limits(msgspec.Struct, frozen=True):
    """Limits of the fidelity gate; `None` is not judged. Shares are 0..1, `kl` in nats per row.

    `worst_slice` and `worst_row` are relative to the deviation from the mean output, see `slice_sums`; `choice` is the
    loss of the best class of outputs that are no logits, see `choice_sums`. `exact` is the share of integers that are
    equal, `worst_value` that of the value that is kept least.

    Of language models, relative errors of the worst single token: `worst_token` against the float model, and
    `schedule` against the same step in one prefill, which no budget of the user (`max_drop`, `max_error`) loosens.
    """

    relative_error: float | None = None
    cosine: float | None = None
    top1: float | None = None
    kl: float | None = None
    perplexity: float | None = None
    worst_token: float | None = None
    schedule: float | None = None
    worst_slice: float | None = None
    worst_row: float | None = None
    choice: float | None = None
    exact: float | None = None
    worst_value: float | None = None
    source: str = "by the limits given"  # words of a refusal on what they are for: `for int8`
    is_budget: bool = False  # of --max-drop


# The quality table of the design: what each precision class may lose against the float original.
_ROWS = {
    "float32": Limits(
        relative_error=1e-3,
        cosine=0.9999,
        top1=0.998,
        kl=1e-4,
        perplexity=0.001,
        worst_token=1e-2,
        schedule=5e-3,
        worst_slice=0.01,
        worst_row=0.02,
        choice=0.001,
        exact=0.99999,
        worst_value=0.9,
    ),
    "tf32": Limits(
        relative_error=5e-3,
        cosine=0.9995,
        top1=0.995,
        kl=5e-4,
        perplexity=0.001,
        worst_token=5e-2,
        schedule=1e-2,
        worst_slice=0.05,
        worst_row=0.1,
        choice=0.002,
        exact=0.995,
        worst_value=0.8,
    ),
    "float16": Limits(
        relative_error=1e-2,
        cosine=0.999,
        top1=0.995,
        kl=1e-3,
        perplexity=0.002,
        worst_token=0.1,
        schedule=2e-2,
        worst_slice=0.05,
        worst_row=0.1,
        choice=0.003,
        exact=0.995,
        worst_value=0.8,
    ),
    "bfloat16": Limits(
        relative_error=5e-2,
        cosine=0.998,
        top1=0.98,
        kl=3e-3,
        perplexity=0.01,
        worst_token=0.5,
        schedule=0.1,
        worst_slice=0.15,
        worst_row=0.4,
        choice=0.01,
        exact=0.98,
        worst_value=0.6,
    ),
    "int8": Limits(
        relative_error=0.10,
        cosine=0.995,
        top1=0.98,
        kl=5e-3,
        perplexity=0.01,
        worst_token=1.0,
        schedule=0.15,
        worst_slice=0.2,
        worst_row=0.6,
        choice=0.03,
        exact=0.98,
        worst_value=0.5,
    ),
    "4bit": Limits(
        relative_error=0.30,
        cosine=0.95,
        top1=0.85,
        kl=0.10,
        perplexity=0.12,
        worst_token=1.2,
        schedule=0.15,
        worst_slice=0.35,
        worst_row=1.1,
        choice=0.1,
        exact=0.85,
        worst_value=0.3,
    ),
    "3bit": Limits(
        relative_error=0.50,
        cosine=0.88,
        top1=0.70,
        kl=0.40,
        perplexity=0.50,
        worst_token=1.5,
        schedule=0.15,
        worst_slice=0.6,
        worst_row=1.4,
        choice=0.25,
        exact=0.7,
        worst_value=0.2,
    ),
    "2bit": Limits(
        relative_error=0.80,
        cosine=0.70,
        top1=0.50,
        kl=1.50,
        perplexity=2.00,
        worst_token=2.0,
        schedule=0.15,
        worst_slice=1,
        worst_row=1.8,
        choice=0.6,
        exact=0.5,
        worst_value=0.1,
    ),
}
LIMITS = {name: msgspec.structs.replace(row, source=f"for {name}") for name, row in _ROWS.items()}


def precision_class(quant: str, dtype: str) -> str:
    """Return the row of `LIMITS` that judges this quantization and compute dtype.

    A format names its own row; without one, or where its plug-in is not installed, the strict limits of float hold.
    """
    name, _, option = quant.partition(":")
    if name in plugins.names(FORMATS):
        declared = getattr(plugins.get(FORMATS, name), "PRECISION_CLASS", "float32")
        row = declared if isinstance(declared, str) else declared.get(option, "float32")
        if row not in LIMITS:
            raise UsageError(
                f"expected a row of the thresholds as PRECISION_CLASS, got {row!r}",
                where=f"format {name}",
                hint=f"Known: {', '.join(LIMITS)}",
            )
        return str(row)
    return dtype if dtype in LIMITS else "float32"


def precision(plan: Plan) -> str:
    """Return the row of `LIMITS` that judges a plan.

    A bit budget is judged by its bits, other plans by format and compute dtype; the KV cache of a language model counts
    where it is coarser.
    """
    weights = _precision_of_weights(plan)
    return _precision_of_cache(plan) if coarser_cache(plan) else weights


def coarser_cache(plan: Plan) -> bool:
    """Return True when the KV cache of a language model keeps less precision than its weights and compute dtype."""
    order, cache = list(LIMITS), _precision_of_cache(plan)
    return cache in order and order.index(cache) > order.index(_precision_of_weights(plan))


def _precision_of_cache(plan: Plan) -> str:
    return "int8" if plan.kv_dtype == "float8_e4m3fn" else plan.kv_dtype


def _precision_of_weights(plan: Plan) -> str:
    if plan.bits is None:
        return precision_class(plan.quant, plan.dtype)
    return next(
        name
        for bits, name in ((7.0, "int8"), (4.0, "4bit"), (3.0, "3bit"), (0.0, "2bit"))
        if plan.bits >= bits
    )


def default_kv_dtype(plan: Plan) -> str:
    """Choose the KV cache's dtype for a resolved plan: a float plan keeps the float model's answers."""
    if plan.dtype == "bfloat16":
        return "bfloat16"
    return "float32" if _precision_of_weights(plan) == "float32" else "float16"


def limits(plan: Plan, task: str) -> Limits:
    """Return the limits of the gate for a plan and task.

    `max_drop` replaces the row of its precision class by one label-free measure: the relative increase of perplexity of
    a language model, the share of rows whose best class changed of a classifier, and the relative error of the outputs
    of everything else, of which no slice may lose more than `SLICE_ROOM` times as much.
    """
    if plan.max_drop is None:
        row = LIMITS[precision(plan)]
        if task == "text-generation":
            row = msgspec.structs.replace(row, **GENERATION.get(precision(plan), {}))
        return _stricter(row) if plan.data == OURS and precision(plan) != "float32" else row
    budget = Limits(is_budget=True, source="by --max-drop")
    if task == "text-generation":
        schedule = LIMITS[precision(plan)].schedule
        return msgspec.structs.replace(budget, perplexity=plan.max_drop, schedule=schedule)
    if task in TOP1_TASKS:
        return msgspec.structs.replace(budget, top1=1 - plan.max_drop)
    return msgspec.structs.replace(
        budget, relative_error=plan.max_drop, worst_slice=SLICE_ROOM * plan.max_drop
    )


def _stricter(row: Limits) -> Limits:
    """Return the limits for inputs that are not the user's: a share of the errors, since theirs may lose more."""
    errors = ("relative_error", "worst_slice", "worst_row", "choice")
    less = {name: value * OURS_SHARE for name in errors if (value := getattr(row, name)) is not None}
    return msgspec.structs.replace(row, **less, source=f"{row.source} on inputs of ours")
