"""`infer.compile` on twelve kinds of module: outcome, structure and error of its answers, speed, overhead.

    python -m bench.live.table [--only lstm,timm] [--quant none,int8] [--seconds 10]

Each module of live_models.py is compiled in a process of its own with `infer.compile(module, data, quant=...)`. Every
call of its data is answered by both: the structure, all types of containers and constants must be equal, the error is
the Frobenius norm of the difference over that of the module's output. The module and the callable are timed in turns on
one row of the first call, under inference mode, and the callable beside its own `Predictor`'s runner for the overhead.
Rows are merged into bench/results/live-DATE-CPU.json and .md. The exit code is 1 where an answer has another structure,
a call of the data ran the module, the module was changed, or something else than a refusal ended the compilation.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from typing import Any

import msgspec
import torch
from torch import Tensor, nn

from bench.live.live_models import MODELS
from bench.shared.command_line import parser_of
from bench.shared.repository import child_environment
from bench.shared.results import TodaysRows, exit_code, progress
from infer.latency import in_turns
from infer.live.call_structure import CallReader

NEEDS = {"timm_cnn": "timm", "timm_vit": "timm", "detector_backbone": "torchvision", "segmenter": "torchvision",
         "graph_network": "torch_geometric"}  # fmt: skip
LIMIT = 900.0  # seconds of one model


class Row(msgspec.Struct):
    """One module in one format. `speed`: the module over the callable; `overhead`: microseconds over the runner."""

    model: str
    quant: str
    outcome: str  # "passed", or the error's class with its sentence
    seconds: float = 0.0
    variants: int = 0
    inputs: tuple[str, ...] = ()
    error: float = 0.0
    headline: str = ""
    speed: float = 0.0
    overhead: float = 0.0
    faults: tuple[str, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.model, self.quant


def measure(name: str, quant: str, seconds: float) -> Row:
    """Compile one module in this process and compare it with itself."""
    import infer
    from infer.errors import GateError, NotUsableError
    from infer.live.given_calls import given_calls

    torch.manual_seed(0)
    module, data = MODELS[name]()
    before = {key: value.clone() for key, value in module.state_dict().items()}
    began = time.perf_counter()
    try:
        fast = infer.compile(module, data, quant=quant)
    except (GateError, NotUsableError) as error:
        return Row(name, quant, f"{type(error).__name__}: {error}", time.perf_counter() - began)
    took = time.perf_counter() - began
    faults: list[str] = []
    errors = [0.0]
    calls = given_calls(module, data, None)
    with torch.inference_mode():
        for call in calls:
            errors.append(
                _difference(fast(*call.args, **call.kwargs), module(*call.args, **call.kwargs), faults)
            )
    if fast.misses:
        faults.append(f"calls of the data ran the module: {dict(fast.misses)}")
    if not all(torch.equal(value, before[key]) for key, value in module.state_dict().items()):
        faults.append("the module was changed")
    one = calls[0]
    speed, overhead = _timed(fast, module, one.args, one.kwargs, seconds)
    first = fast.variants[0]
    return Row(
        name, quant, "passed", took, len(fast.variants), tuple(spec.format() for spec in first.predictor.inputs),
        max(errors), first.report.headline, speed, overhead, tuple(faults),
    )  # fmt: skip


def _difference(got: Any, expected: Any, faults: list[str]) -> float:
    """Return the largest relative error of a tensor; note where the structure is another one."""
    if _shape_of(got) != _shape_of(expected):
        faults.append(f"another structure: {_shape_of(got)} instead of {_shape_of(expected)}")
        return float("inf")
    pairs = zip(_tensors(got), _tensors(expected), strict=True)
    return max(float((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-12)) for a, b in pairs)


def _parts(value: Any) -> list[Any] | None:
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple):
        return list(value)
    if hasattr(value, "__dataclass_fields__"):
        return [getattr(value, name) for name in value.__dataclass_fields__]
    return list(value.values()) if hasattr(value, "values") and not isinstance(value, Tensor) else None


def _shape_of(value: Any) -> str:
    """Write the types and constants of a value; this code shares nothing with what is measured."""
    parts = _parts(value)
    if parts is not None:
        return f"{type(value).__name__}({', '.join(map(_shape_of, parts))})"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def _tensors(value: Any) -> list[Tensor]:
    parts = _parts(value)
    if parts is not None:
        return [tensor for part in parts for tensor in _tensors(part)]
    return [value] if isinstance(value, Tensor) else []


@torch.inference_mode()
def _timed(
    fast: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], seconds: float
) -> tuple[float, float]:
    """Return module over callable, and the callable over its runner in microseconds, in turns."""
    structure, read = CallReader(module).read(args, kwargs)
    variant = next(v for v in fast.variants if v.structure.key == structure.key)
    named = dict(zip(structure.names, read, strict=True))
    calls = [
        lambda: module(*args, **kwargs),
        lambda: fast(*args, **kwargs),
        lambda: variant.predictor.run_fitting(named),
    ]
    own, callable_, runner = in_turns(calls, min_seconds=seconds, max_runs=100_000)
    return own.p50 / callable_.p50, (callable_.p50 - runner.p50) * 1e6


def page(rows: list[Row]) -> str:
    """Write the table of all rows."""
    lines = [
        "| module | format | outcome | s | variants | error | verdict | module ÷ callable | overhead µs |"
    ]
    lines.append("|---|---|---|--:|--:|--:|---|--:|--:|")
    for row in rows:
        faults = f" **{'; '.join(row.faults)}**" if row.faults else ""
        error = f"{row.error:.1e}" if row.variants else ""
        speed = f"{row.speed:.2f}" if row.variants else ""
        overhead = f"{row.overhead:.0f}" if row.variants else ""
        cells = (row.model, row.quant, row.outcome.replace("|", "/") + faults, f"{row.seconds:.0f}", row.variants or "",
                 error, row.headline, speed, overhead)  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--only", default="", help="words of names, separated by commas")
    parser.add_argument("--quant", default="none,int8", help="formats, separated by commas")
    parser.add_argument("--seconds", type=float, default=10.0, help="of timing for each row")
    parser.add_argument("--child", default="", help="measure one module here and print its row")
    options = parser.parse_args()
    if options.child:
        print(msgspec.json.encode(measure(options.child, options.quant, options.seconds)).decode())
        return 0
    order = {name: index for index, name in enumerate(MODELS)}
    rows = TodaysRows("live", Row, page, order=lambda row: (order[row.model], row.quant != "none"))
    words = [word for word in options.only.split(",") if word]
    missed: list[str] = []
    for name in MODELS:
        if words and not any(word in name for word in words):
            continue
        if (needed := NEEDS.get(name)) and importlib.util.find_spec(needed) is None:
            progress(f"{name}: {needed} is not installed")
            continue
        for quant in options.quant.split(","):
            row = _in_process(name, quant, options.seconds)
            progress(f"{name} {quant}: {row.outcome[:120]} {row.headline} {'; '.join(row.faults)}")
            rows.keep([row])
            missed += [f"{name} {quant}: {fault}" for fault in row.faults]
            if row.outcome.startswith("failed"):
                missed.append(f"{name} {quant}: {row.outcome}")
    return exit_code(missed)


def _in_process(name: str, quant: str, seconds: float) -> Row:
    command = [
        sys.executable,
        "-m",
        "bench.live.table",
        "--child",
        name,
        "--quant",
        quant,
        "--seconds",
        str(seconds),
    ]
    try:
        done = subprocess.run(
            command, env=child_environment(), capture_output=True, text=True, timeout=LIMIT, check=False
        )
    except subprocess.TimeoutExpired:
        return Row(name, quant, f"failed: more than {LIMIT:.0f} s")
    if done.returncode:
        return Row(name, quant, f"failed: {done.stderr.strip().splitlines()[-1][:300]}")
    return msgspec.convert(json.loads(done.stdout.strip().splitlines()[-1]), Row)


if __name__ == "__main__":
    sys.exit(main())
