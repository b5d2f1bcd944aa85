"""The words of `infer` as values: tensor specs, the plan, choices, findings; the only place that knows defaults."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from .errors import InputError, UsageError

if TYPE_CHECKING:
    import torch

    DTYPES: dict[str, torch.dtype]
    DTYPE_NAMES: dict[torch.dtype, str]

NAMES = ("float32", "float16", "bfloat16", "float64", "int8", "uint8", "int16", "int32", "int64", "bool")
ALIASES = {"fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "bf16": "bfloat16"}
ALIASES |= {"fp64": "float64", "f64": "float64", "i64": "int64", "i32": "int32", "u8": "uint8", "i8": "int8"}

_INPUT = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)=(?P<dtype>\w+)\[(?P<dims>[^\]]*)\]$")
_DIM = re.compile(r"^[A-Za-z_]\w*$")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}
_SIZE = re.compile(r"\s*([0-9.]+)\s*([KMG]?I?)B?\s*", re.IGNORECASE)


class TensorSpec(msgspec.Struct, frozen=True):
    """Name, dtype and shape of one input or output; a `str` size is symbolic and shared by name."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        import torch

        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        return f"{self.name!r} {self.dtype} [{', '.join(map(str, self.shape))}]"

    @classmethod
    def parse(cls, text: str) -> TensorSpec:
        """`ids=int64[batch,seq]`; raises `UsageError` with the form that was expected."""
        match = _INPUT.match(text.replace(" ", ""))
        if match is None:
            raise UsageError(f"expected NAME=DTYPE[DIMS], got {text!r}", hint="Example: ids=int64[batch,seq]")
        dtype = ALIASES.get(match["dtype"], match["dtype"])
        if dtype not in NAMES:
            raise UsageError(f"no dtype named {match['dtype']!r}", hint=f"Known: {', '.join(NAMES)}")
        return cls(
            match["name"], dtype, tuple(_size(part, text) for part in match["dims"].split(",") if part)
        )

    def format(self) -> str:
        """The inverse of `parse`."""
        return f"{self.name}={self.dtype}[{','.join(map(str, self.shape))}]"

    @property
    def batched(self) -> bool:
        return bool(self.shape) and self.shape[0] == "batch"

    def with_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Exactly `rows` rows of a batched tensor, repeating what is there; an unbatched one as it is."""
        if not self.batched:
            return tensor
        return tensor.repeat(-(-rows // len(tensor)), *[1] * (tensor.dim() - 1))[:rows].contiguous()

    def check(
        self, array: np.ndarray | torch.Tensor, where: str = "", sizes: dict[str, int] | None = None
    ) -> None:
        """Raise `InputError` unless dtype and shape fit; `sizes` collects symbolic sizes across tensors."""
        dtype = str(array.dtype).removeprefix("torch.")
        got = f"{dtype} {list(array.shape)}"
        if dtype != self.dtype or len(array.shape) != len(self.shape):
            raise InputError(f"expected input {self}, got {got}", where=where)
        bound = {} if sizes is None else sizes
        for want, have in zip(self.shape, array.shape, strict=True):
            expected = bound.setdefault(want, int(have)) if isinstance(want, str) else want
            if expected != have:
                named = f" with {want}={expected}" if isinstance(want, str) else ""
                raise InputError(f"expected input {self}{named}, got {got}", where=where)


def __getattr__(name: str) -> Any:
    """`DTYPES`: name → torch dtype, and `DTYPE_NAMES`, its inverse; torch is imported for those who ask."""
    if name not in ("DTYPES", "DTYPE_NAMES"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import torch

    dtypes = {known: getattr(torch, known) for known in NAMES}
    return dtypes if name == "DTYPES" else {value: known for known, value in dtypes.items()}


def _size(part: str, text: str) -> int | str:
    if part.isdigit() and int(part) > 0:
        return int(part)
    if _DIM.match(part):
        return part
    raise UsageError(f"a size is a positive number or a name, got {part!r} in {text!r}")


def parse_size(text: str | int | None, where: str) -> int | None:
    """`2GiB`, `500MB`, `1048576` → bytes."""
    if text is None or isinstance(text, int):
        return text
    match = _SIZE.fullmatch(text)
    try:
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    except (ValueError, KeyError):
        size = 0
    if size <= 0:
        raise UsageError(f"expected a size like 2GiB or 500MB, got {text!r}", where=where)
    return size


class Choice(msgspec.Struct, frozen=True):
    """One decision: what was asked, what was taken, and why."""

    what: str
    asked: str
    value: str
    reason: str


class Finding(msgspec.Struct, frozen=True):
    """One measured or decided fact. `stage` is the arrow of the street that found it."""

    stage: str
    what: str
    value: float | int | str | bool | None
    unit: str = ""
    why: str = ""


class LayerChoice(msgspec.Struct, frozen=True):
    """The format of one layer. `effect` is what each format alone does to the model's output, where it was measured:
    KL in nats per row for logits, otherwise the squared relative error; both add up over layers in first order."""

    name: str
    format: str  # "float", "int8", "cluster:3", …
    bits: float  # per weight, tables and scales included
    weight_error: float | None = None  # relative rms
    effect: dict[str, float] = {}
    why: str = ""


# auto: generate where the model can, else score whole windows; generate: refuse a model that can't.
TASKS = ("auto", "generate", "score")
# none: where a format needs it only; diagonal: columns weigh by their mean square; gptq: error feedback.
CALIBRATIONS = ("auto", "none", "diagonal", "gptq")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All that is asked of one `optimize`; "auto" is resolved once, into a new plan plus a `Choice`."""

    source: str
    backend: str = "auto"
    quant: str = "none"
    layers: dict[
        str, str
    ] = {}  # layer name or glob → format; whoever is named here is never decided otherwise
    bits: float | None = None  # mean bits per weight of the layers that a format can take
    max_drop: float | None = None  # share, 0…1: see `limits`
    calibrate: str = "auto"  # how quantizers use real inputs: `CALIBRATIONS`
    dtype: str = "auto"
    kv_dtype: str = "auto"  # of the KV cache of a language model: `KV_DTYPES` of `infer.attention`
    chat_template: str | None = None  # a Jinja file, for a language model
    adapters: str = ""  # SLOTS or SLOTS:RANK of LoRA adapters that a language model has room for
    device: str = "auto"
    inputs: tuple[str, ...] = ()
    model: str | None = None
    data: str | None = None
    golden: bool = True  # the artifact keeps two rows of `data` for its self-test, else synthetic ones
    task: str = "auto"  # of a language model: `TASKS`
    load: str = "auto"
    trust_code: bool = False
    allow_slower: bool = False
    allow_partial: bool = False  # less than a tenth of the weights quantized is enough
    max_error: float | None = None
    max_batch: int = 64
    max_length: int = 512
    threads: int | None = None
    batches: tuple[int, ...] = (1, 8)
    seed: int = 0

    @property
    def quant_name(self) -> str:
        """`cluster:3` → `cluster`."""
        return self.quant.partition(":")[0]

    @property
    def quant_option(self) -> str:
        """`cluster:3` → `3`; empty when none was given."""
        return self.quant.partition(":")[2]

    def with_(self, **changes: Any) -> Plan:
        return msgspec.structs.replace(self, **changes)


class Workload(msgspec.Struct, frozen=True):
    """The use that a language model is timed for, at each batch size of the plan: that many prompts of `prompt` tokens,
    read `chunk` tokens in a step, each answered by `answer` tokens. Dispatch sums a layer's time over it, the speed
    gate the model's."""

    prompt: int = 256
    answer: int = 128
    chunk: int = 256

    def steps(self, batch: int) -> dict[int, int]:
        """Tokens in a step → number of such steps."""
        whole, rest = divmod(batch * self.prompt, self.chunk)
        steps = {batch: self.answer}
        for tokens, count in ((self.chunk, whole), (rest, 1)):
            if tokens and count:
                steps[tokens] = steps.get(tokens, 0) + count
        return steps

    def logits(self, batch: int) -> dict[int, int]:
        """Tokens whose logits a step computes → number of such steps: of a prompt only its last token's."""
        return {batch: self.answer + 1}

    def __str__(self) -> str:
        return f"a prompt of {self.prompt} tokens and an answer of {self.answer}"


WORKLOAD = Workload()


def saves_memory(quant: str) -> bool:
    """Weight-only formats: their point is memory, so that their layers need not be faster one by one."""
    return quant == "int8:weight" or quant.partition(":")[0] in ("nf4", "int4", "fp4", "cluster")


class Limits(msgspec.Struct, frozen=True):
    """What the fidelity gate allows; `None` is not judged. Shares are 0..1, `kl` in nats per row.

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


# The quality table of the design: what each precision class may lose against the float original.
LIMITS: dict[str, Limits] = {
    "float32": Limits(
        relative_error=1e-3,
        cosine=0.9999,
        top1=0.998,
        kl=1e-4,
        perplexity=0.001,
        worst_token=1e-2,
        schedule=5e-3,
    ),
    "tf32": Limits(
        relative_error=5e-3,
        cosine=0.9995,
        top1=0.995,
        kl=5e-4,
        perplexity=0.001,
        worst_token=5e-2,
        schedule=1e-2,
    ),
    "float16": Limits(
        relative_error=1e-2,
        cosine=0.999,
        top1=0.995,
        kl=1e-3,
        perplexity=0.002,
        worst_token=0.1,
        schedule=2e-2,
    ),
    "bfloat16": Limits(
        relative_error=5e-2, cosine=0.998, top1=0.98, kl=3e-3, perplexity=0.01, worst_token=0.5, schedule=0.1
    ),
    "int8": Limits(
        relative_error=0.10, cosine=0.995, top1=0.98, kl=5e-3, perplexity=0.01, worst_token=1.0, schedule=0.15
    ),
    "4bit": Limits(
        relative_error=0.30, cosine=0.95, top1=0.85, kl=0.10, perplexity=0.12, worst_token=1.2, schedule=0.15
    ),
    "3bit": Limits(
        relative_error=0.50, cosine=0.88, top1=0.70, kl=0.40, perplexity=0.50, worst_token=1.5, schedule=0.15
    ),
    "2bit": Limits(
        relative_error=0.80, cosine=0.70, top1=0.50, kl=1.50, perplexity=2.00, worst_token=2.0, schedule=0.15
    ),
}


def precision_class(quant: str, dtype: str) -> str:
    """The row of `LIMITS` that judges this quantization and compute dtype."""
    name, _, option = quant.partition(":")
    if name == "cluster":
        return {"2": "2bit", "3": "3bit", "6": "int8"}.get(option, "4bit")
    if name in ("nf4", "int4", "fp4"):
        return "4bit"
    if name in ("int8", "fp8"):
        return "int8"
    return dtype if dtype in LIMITS else "float32"


def precision(plan: Plan) -> str:
    """The row of `LIMITS` that judges a plan: of a bit budget by its bits, else by format and compute dtype; the KV
    cache of a language model counts where it is coarser."""
    weights = _precision_of_weights(plan)
    return plan.kv_dtype if coarser_cache(plan) else weights


def coarser_cache(plan: Plan) -> bool:
    """True when the KV cache of a language model keeps less precision than its weights and compute dtype."""
    order = list(LIMITS)
    return plan.kv_dtype in order and order.index(plan.kv_dtype) > order.index(_precision_of_weights(plan))


def _precision_of_weights(plan: Plan) -> str:
    if plan.bits is None:
        return precision_class(plan.quant, plan.dtype)
    return next(
        name
        for bits, name in ((7.0, "int8"), (4.0, "4bit"), (3.0, "3bit"), (0.0, "2bit"))
        if plan.bits >= bits
    )


def default_kv_dtype(plan: Plan) -> str:
    """The KV cache of a plan whose dtypes and format are resolved: a float plan keeps the float model's answers."""
    if plan.dtype == "bfloat16":
        return "bfloat16"
    return "float32" if _precision_of_weights(plan) == "float32" else "float16"


def limits(plan: Plan, task: str) -> Limits:
    """What the gate allows. `max_drop` replaces the row of its precision class by one label-free measure: the relative
    increase of perplexity of a language model, the share of rows whose best class changed of a classifier, and the
    relative error of the outputs of everything else."""
    if plan.max_drop is None:
        return LIMITS[precision(plan)]
    if task == "text-generation":
        return Limits(perplexity=plan.max_drop, schedule=LIMITS[precision(plan)].schedule)
    return (
        Limits(top1=1 - plan.max_drop) if task == "classification" else Limits(relative_error=plan.max_drop)
    )
