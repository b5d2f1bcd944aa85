"""The report as a value, stored as `report.json`: all that was requested, tried, chosen, refused and measured."""

from __future__ import annotations

from typing import Any

import msgspec

from ..latency import Latency, Paired
from ..plan import Plan
from ..results import BackendResult
from ..sanitize import sanitize_values
from ..spec import Choice, Finding, LayerChoice, TensorSpec
from .measurements.memory import Memory
from .measurements.roofline import MachineRoofline
from .measurements.step_breakdown import StepBreakdown
from .search_record import SearchRecord

REPORT_FORMAT = 2


class LatencyRow(msgspec.Struct, frozen=True):
    """One batch size. `floor` is the least time possible, in seconds; `of_ceiling` is floor / p50.

    `in_cache`: what a call reads stays in the processor's caches, whose bandwidth the floor takes. `lengths`: tokens of
    the shortest and the longest row, of a model with an attention mask.
    """

    batch: int
    pair: Paired
    per_second: float
    floor: float | None = None
    of_ceiling: float | None = None
    bound: str = ""
    in_cache: bool = False
    lengths: tuple[int, int] | None = None

    @property
    def ours(self) -> Latency:
        return self.pair.a

    @property
    def baseline(self) -> Latency:
        return self.pair.b


class FidelityRow(msgspec.Struct, frozen=True):
    """One metric; without a `limit` it is shown, not judged. `used` is the share of what the limit allows.

    `what` is the label that people read; code asks for `subject` and `metric`, as `infer.results.Metric` has them.
    """

    what: str
    value: float | int | str | bool | None
    unit: str
    why: str
    subject: str
    metric: str
    limit: float | None = None
    larger_is_worse: bool = True
    used: float | None = None
    ok: bool | None = None


class CacheSize(msgspec.Struct, frozen=True):
    """The KV cache of a language model that generates."""

    dtype: str
    bytes_per_token: float
    page: int | None = None  # tokens of a page; None in reports that did not keep it
    state_bytes: int = 0  # of the state layers of one sequence


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """See the fields; sizes are bytes, times seconds. `headline` is read first, then `verdict`.

    Code decides on everything but `headline`, `verdict` and `findings`, which are for display.
    """

    format: int = REPORT_FORMAT
    name: str
    made_with: str
    headline: str
    passed: bool
    failure: str = ""
    verdict: tuple[str, ...]
    limitations: tuple[str, ...] = ()  # those sentences of the verdict that say what the artifact can't do
    command: str
    backend: str
    device: str
    task: str
    precision: str
    baseline: str
    plan: Plan
    choices: tuple[Choice, ...]
    tried: tuple[BackendResult, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    fidelity: tuple[FidelityRow, ...]
    latency: tuple[LatencyRow, ...]
    layers: tuple[LayerChoice, ...] = ()
    quantized: str = ""  # for display: `94 % of the weights are int8`
    size: int  # without `rows_size`
    rows_size: int = 0  # of the rows that an artifact is checked with when it is opened
    original_size: int | None
    decodes: bool = False  # what was timed is one decode step of `batch` sequences, not a batch of samples
    ceiling: MachineRoofline | None = None
    memory: Memory | None = None
    steps: tuple[StepBreakdown, ...] = ()  # of a language model: where a decode step goes
    cache: CacheSize | None = None
    search: SearchRecord | None = None  # the search that this artifact won
    findings: tuple[Finding, ...]
    versions: dict[str, str]
    machine: dict[str, str]


def encode(report: Report) -> bytes:
    """Encode a report as indented JSON; unknown values are null."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1)


def decode(data: bytes) -> Report:
    """Invert `encode`; texts are stripped of what a terminal would obey. Raises `msgspec.MsgspecError` for what this
    version of infer did not write.
    """
    stored = msgspec.json.decode(data, type=dict[str, Any])
    if stored.get("format") != REPORT_FORMAT:
        raise msgspec.ValidationError(
            f"expected report format {REPORT_FORMAT}, got {stored.get('format')!r:.40}"
        )
    return msgspec.convert(sanitize_values(stored), Report, str_keys=True)
