"""Speed bars of single linear layers: lut4 and int8 against other engines, M rows by a weight [N, K]."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.kernels import linear_ggml, linear_infer, linear_ort, linear_torch
from bench.kernels.linear_infer import Ours, relative
from bench.llm import llama_cpp_model
from bench.shared import timing
from bench.shared.bars import Bar
from bench.shared.rivals import Rivals
from bench.shared.timing import Side
from infer.device import measured_speed

MEMORY, ORT, GGML, FBGEMM, FLOAT = "reading memory", "ORT", "llama.cpp", "torch fbgemm", "torch float32"
FEW = 16  # rows up to which weights come from DRAM, as in a model that is larger than the caches
MOST_COPIES = 64
# Relative error that an engine may have against the float product of Gaussian weights: above, it is broken.
LARGEST_ERROR = {"lut4": 0.14, "int8": 0.03}


@dataclass(frozen=True)
class Case:
    """One interleaved run: the engines that take part, and the factor required against each."""

    kind: str  # "lut4" | "int8"
    rows: int
    columns: int
    batch: int
    needs: dict[str, float]

    @property
    def name(self) -> str:
        return f"{self.kind} {self.rows}×{self.columns} M={self.batch}"


def cases() -> Iterator[Case]:
    """Yield the layers, sizes and required factors."""
    for rows, columns in ((4096, 4096), (8192, 2048)):
        yield Case("lut4", rows, columns, 1, {MEMORY: 0.8, ORT: 1.3, GGML: 1.3})
        yield Case("lut4", rows, columns, 4, {ORT: 1.3, GGML: 2.0})
        yield Case("lut4", rows, columns, 8, {GGML: 2.0})
        yield Case("lut4", rows, columns, 16, {ORT: 1.3, GGML: 1.3})
        for batch in (128, 512):
            yield Case("lut4", rows, columns, batch, {FLOAT: 1.5})
        for batch in (1, 16, 128, 512):
            need = 1.2 if batch <= FEW else 1.0
            yield Case("int8", rows, columns, batch, {ORT: need, FBGEMM: need})
    for width in (576, 2048):
        for batch in (4, 8):
            yield Case("lut4", width, width, batch, {GGML: 2.0})


_MISSING: dict[str, Callable[[], str | None]] = {
    ORT: linear_ort.missing,
    GGML: llama_cpp_model.missing,
    FBGEMM: linear_torch.missing,
}


def measure(case: Case) -> list[Bar]:
    """Build the engines, compare their products with the float product, and only then time them in turns.

    Every rival is in a process of its own; one that crashes has the row `crashed: signal 11`.
    """
    weight, x = _weight(case.rows, case.columns), torch.randn(case.batch, case.columns)
    ours = (linear_infer.lut4 if case.kind == "lut4" else linear_infer.int8)(weight, x, _copies(case))
    exact, twin = x.double() @ weight.double().t(), ours.twin()
    problem = _problem(case, "ours", ours.side.output(), exact)
    off = relative(ours.side.output(), twin)
    if off > linear_infer.EXACT:
        problem = f"ours is {off:.1e} off its slow twin"
    bars = [Bar(work=case.name, rival=rival, need=need) for rival, need in case.needs.items()]
    if problem:
        return [_with(bar, why=problem) for bar in bars]
    absent = {rival: _MISSING[rival]() for rival in case.needs if rival in _MISSING}
    errors = {"ours": relative(ours.side.output(), exact)}
    with Rivals() as rivals:
        for rival in case.needs:
            if rival != MEMORY and not absent.get(rival):
                rivals.start(rival, rival_sides, case, rival, weight.numpy(), x.numpy())
        for name, product in rivals.outputs().items():
            absent |= {name: _problem(case, name, product, exact)}
            errors[name] = relative(product, exact)
        names = {rival: [side.name for side in rivals.sides(rival)] for rival in case.needs}
        seconds = rivals.interleaved([ours.side, *([timing.reader()] if MEMORY in case.needs else [])])
        absent |= rivals.crashed
    details = {"seconds": seconds, "relative_error": errors, "off_twin": off, "crashed": rivals.crashed}
    return [_judged(bar, ours, names, absent, seconds, details) for bar in bars]


@functools.lru_cache(maxsize=1)
def _weight(rows: int, columns: int) -> Tensor:
    """Return a Gaussian weight, of a size that keeps values as they are from layer to layer."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)) / columns**0.5


def _judged(
    bar: Bar,
    ours: Ours,
    names: Mapping[str, list[str]],
    absent: Mapping[str, str | None],
    seconds: dict[str, float],
    details: dict[str, object],
) -> Bar:
    problems = [absent.get(bar.rival), *(absent.get(name) for name in names[bar.rival])]
    if why := next(filter(None, problems), None):
        return _with(bar, why=why, details=details)
    own = seconds["ours"]
    if bar.rival == MEMORY:
        bandwidth = timing.READ_BYTES / seconds[MEMORY]
        least = ours.num_bytes / bandwidth
        changes = {"got": least / own, "unit": "of its bandwidth", "ours": own, "theirs": least}
        return _with(bar, **changes, details=details)
    best = min(seconds[name] for name in names[bar.rival])
    return _with(bar, got=best / own, ours=own, theirs=best, details=details)


def _with(bar: Bar, **changes: object) -> Bar:
    import msgspec

    return msgspec.structs.replace(bar, **changes)


def _problem(case: Case, name: str, y: Tensor, exact: Tensor) -> str | None:
    error = relative(y, exact)
    if error <= LARGEST_ERROR[case.kind]:
        return None
    return f"{name} is wrong: relative error {error:.3g}"


def rival_sides(case: Case, rival: str, weights: np.ndarray, given: np.ndarray) -> list[Side]:
    """Return a rival's sides in this process: weights float32 [N, K], given float32 [M, K]."""
    weight, x, copies = torch.from_numpy(weights), torch.from_numpy(given), _copies(case)
    if rival == GGML:
        return linear_ggml.sides(weight, x, copies)
    if rival == ORT:
        return [(linear_ort.int4 if case.kind == "lut4" else linear_ort.int8)(weight, x, copies)]
    return [(linear_torch.fbgemm if rival == FBGEMM else linear_torch.float32)(weight, x, copies)]


def _copies(case: Case) -> int:
    """Return the number of copies that makes a weight leave the caches before its next turn."""
    if case.batch > FEW:
        return 1
    num_bytes = case.rows * case.columns // (2 if case.kind == "lut4" else 1)
    return min(-(-4 * measured_speed.last_level_cache() // num_bytes), MOST_COPIES)
