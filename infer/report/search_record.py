"""Record of a search: every trial with its outcome, measurements and command; part of the report of the winner."""

from __future__ import annotations

from typing import Literal

import msgspec

from ..budgets import Budgets
from ..options.values import parse_backend_options
from ..plan import Plan

# published: passed its gates and was measured; refused: a gate, a backend or a format declined; skipped: a bound said
# that it can't win, or the time was over; the others are what ended its process.
Outcome = Literal[
    "published", "refused", "skipped", "crashed", "timed out", "out of memory", "disk full", "failed"
]


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """One point of the space: what a trial asks of `optimize`. "auto" leaves a field to the plan's own choice."""

    backend: str
    quant: str = "none"
    bits: float | None = None  # mixed precision within a size
    drop: bool = False  # mixed precision within --max-drop
    dtype: str = "auto"
    calibrate: str = "auto"
    kv_dtype: str = "auto"
    threads: int | None = None
    options: tuple[str, ...] = ()  # of the backend, NAME=VALUE

    @property
    def is_float(self) -> bool:
        """True for the unquantized model in float32, with the backend's usual options."""
        return not self.is_quantized and self.dtype in ("auto", "float32") and not self.options

    @property
    def is_quantized(self) -> bool:
        return self.quant != "none" or self.bits is not None or self.drop

    @property
    def format(self) -> str:
        """Name of the candidate's format: `int8`, `5 bits`, `within the drop`, `float`."""
        if self.drop:
            return "mixed within the drop"
        if self.bits is not None:
            return f"mixed {self.bits:g} bits"
        return "float" if self.quant == "none" else self.quant

    @property
    def label(self) -> str:
        """Name of the candidate: `ort int8`, `openvino float bfloat16, 2 threads`."""
        parts = [self.backend, self.format, *([] if self.dtype == "auto" else [self.dtype])]
        named = (("calibrate", self.calibrate, "auto"), ("KV", self.kv_dtype, "auto"))
        extra = [f"{name} {value}" for name, value, usual in named if value != usual]
        extra += [] if self.threads is None else [f"{self.threads} thread{'s' if self.threads > 1 else ''}"]
        extra += [option.replace("=", " ") for option in self.options]
        return ", ".join([" ".join(parts), *extra])

    def plan(self, plan: Plan) -> Plan:
        """Return the plan of this trial; budgets of the search do not judge a single one but `drop`."""
        return plan.with_(
            backend=self.backend,
            quant=self.quant,
            bits=self.bits,
            max_drop=plan.max_drop if self.drop else None,
            dtype=plan.dtype if self.dtype == "auto" else self.dtype,
            calibrate=plan.calibrate if self.calibrate == "auto" else self.calibrate,
            kv_dtype=plan.kv_dtype if self.kv_dtype == "auto" else self.kv_dtype,
            threads=self.threads or plan.threads,
            backend_options=parse_backend_options(self.options) or plan.backend_options,
        )


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of a trial: seconds by batch size, bytes, shares. None is unknown.

    `seconds`: medians; `least`: the shortest call; `ratios`: to the float form `rivals` at the same batch size,
    measured in turns with it, and `rival_seconds` what that form took then. `error`: the largest relative error of an
    output; `drop`: the loss that --max-drop limits; `score`: the value of --metric. `floor`: the least seconds that
    memory and arithmetic allow.
    """

    seconds: dict[int, float] = {}
    least: dict[int, float] = {}
    p99: dict[int, float] = {}
    ratios: dict[int, float] = {}
    rivals: dict[int, str] = {}
    rival_seconds: dict[str, dict[int, float]] = {}
    floor: dict[int, float] = {}
    layer_seconds: dict[int, float] = {}  # of all layers that were timed alone before the trial, together
    layer_gain: dict[int, float] = {}  # seconds that these take less than in float
    first_token: float | None = None
    memory: int | None = None  # peak of a fresh process
    kv_bytes_per_token: float | None = None
    size: int | None = None
    error: float | None = None
    drop: float | None = None
    score: float | None = None
    complete: bool = (
        True  # False: no artifact was made of a trial that is far slower, so that memory is unknown
    )
    faithful: bool = True  # within the limits of its precision class
    slower: bool = False  # than the fastest float form

    @property
    def latency(self) -> float | None:
        """Median seconds at the smallest batch size."""
        return self.seconds[min(self.seconds)] if self.seconds else None

    @property
    def latency_p99(self) -> float | None:
        return self.p99[min(self.p99)] if self.p99 else None

    @property
    def throughput(self) -> float | None:
        """Rows per second at the best batch size."""
        return max((batch / s for batch, s in self.seconds.items() if s > 0), default=None)

    def memory_with_cache(self, sequences: int, tokens: int) -> int | None:
        """Return the memory with the KV cache of so many sequences of so many tokens."""
        if self.memory is None:
            return None
        return self.memory + round((self.kv_bytes_per_token or 0.0) * sequences * tokens)


class InTurns(msgspec.Struct, frozen=True, kw_only=True):
    """Time of a row over that of the trial named `against`, measured in turns: ratio, 95 % interval, rounds.

    `verdict` is that of `infer.latency`: faster, slower, same, or within noise. `aim`: the objective, whose batch size
    was timed.
    """

    against: str
    ratio: float
    low: float
    high: float
    rounds: int
    verdict: str
    aim: str = ""


class TrialRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One trial: outcome, its reason, measurements as far as they were made, and the command that makes it."""

    candidate: Candidate
    outcome: Outcome
    reason: str = ""
    took: float = 0.0  # seconds
    measured: Measured | None = None
    command: str = ""
    from_journal: bool = False
    node: str = ""  # of a Ray cluster, that ran it; "": this machine
    on_front: bool = False
    chosen: bool = False
    misses: tuple[str, ...] = ()  # budgets that it does not meet
    turns: InTurns | None = (
        None  # of those nearest to the best: against the fastest for the objective, or itself
    )


class SearchRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A whole search: what was asked, every trial in the order of its end, and how it ended."""

    budgets: Budgets
    max_drop: float | None = None
    max_error: float | None = None
    trials: tuple[TrialRecord, ...] = ()
    took: float = 0.0  # seconds
    why: str = ""  # this one
    interrupted: str = ""  # by what, when it did not end by itself
    command: str = ""  # that repeats the search
