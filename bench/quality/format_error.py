"""Error of quantized weights against published formats, and fidelity of real models in each format.

    python -m bench.quality.format_error [--parts weights,models] [--models digits,minilm,pydoc_lm] [--quants …]

Weights: relative rms error of checkpoints, at the bits each format takes; the rivals are re-implemented from their
published formats (published_formats.py). Models: each format without calibration, with column weights, and with error
feedback, calibrated and judged on different rows. Writes bench/results/quality-DATE-CPU.json and .md; exits 1 when nf4
or nf4:16 is less than 8 % below absmax nf4, nf4:16 less than 8 % below iq4_nl, or when calibration makes a model worse.
iq4_nl takes 4.5 bits and nf4:16 4.5 and 32/K: beside its error stands what that is at 4.5 bits, 6.02 dB for a bit.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from bench.quality import published_formats as rivals
from bench.quality.backend_table import plans
from bench.shared.command_line import parser_of
from bench.shared.results import heading, machine_header, progress, result_path
from infer import compress, load
from infer.compress.formats import nf4
from infer.errors import NotUsableError
from infer.fidelity import Comparison
from infer.graph.program import flatten
from infer.plan import Plan
from infer.weights.safetensors_file import open_safetensors

FINE = ("nf4:16", "int4:16", "fp4:16")
QUANTS = (
    *("int8", "int8:static", "int8:weight", "nf4", "int4", "fp4", *FINE),
    *("cluster:2", "cluster:3", "cluster:4", "cluster:6"),
)
IQ4_NL = "iq4_nl, 32, float16 (GGUF)"
BAR = 0.08  # below absmax nf4, and below iq4_nl at its bits
METHODS = ("none", "diagonal", "gptq")
ROWS = 8
LARGEST = 1 << 21  # weights of one tensor that are measured
SAID = {
    "digits": ("top1", "kl", "relative_error"),
    "minilm": ("cosine", "recall", "relative_error"),
    "pydoc_lm": ("perplexity_change", "kl", "top1"),
}


class Weights(msgspec.Struct):
    """Relative rms error of one format over the matrices of a checkpoint."""

    checkpoint: str
    format: str
    bits: float
    error: float
    against_absmax: float


class FormatResult(msgspec.Struct):
    """Fidelity of one model in one format, on rows that did not calibrate it."""

    model: str
    quant: str
    calibration: str
    bits: float
    seconds: float
    figures: dict[str, float]


def checkpoints() -> Iterator[tuple[str, Callable[[], Iterator[Tensor]]]]:
    """Yield the name and float matrices [N, K] of each checkpoint, K a multiple of 64."""
    import minilm
    import pydoc_lm

    for name, folder in (("minilm", minilm.checkpoint_folder()), ("pydoc_lm", pydoc_lm.checkpoint_folder())):
        yield name, lambda folder=folder: matrices(Path(folder) / "model.safetensors")
    make = torch.Generator().manual_seed(0)
    yield "random normal", lambda: iter([torch.randn(1024, 1024, generator=make)])


def matrices(path: Path) -> Iterator[Tensor]:
    for weight in open_safetensors(path).weights.values():
        shape = weight.shape
        if len(shape) == 2 and shape[1] % 64 == 0 and shape[0] * shape[1] >= 4096:
            yield weight.rows(0, min(shape[0], LARGEST // shape[1])).float()


def formats() -> dict[str, Callable[[Tensor], tuple[Tensor, float]]]:
    """Return format → weight [N, K] → what it becomes, and its bits per weight."""

    def ours(name: str) -> Callable[[Tensor], tuple[Tensor, float]]:
        plan = Plan(source="", quant=name)
        way = compress.get(plan)

        def shrunk(weight: Tensor) -> tuple[Tensor, float]:
            tensors = way.quantize(weight, None, plan)
            return way.dequantize(tensors), compress.bits_per_weight(tensors, weight.numel())

        return shrunk

    table = torch.tensor(nf4.TABLE)
    return {
        "nf4 absmax, 64, float32 (bitsandbytes)": lambda w: (rivals.absmax(w, table, 64), 4.5),
        "nf4": ours("nf4"),
        "nf4:16": ours("nf4:16"),
        IQ4_NL: lambda w: (rivals.iq4_nl(w), 4.5),
        "nf4, 32, float16": lambda w: (rivals.searched(w, table, 32), 4.5),
        "iq4_nl table, 32, float16, our search": lambda w: (rivals.searched(w, rivals.IQ4_NL / 127, 32), 4.5),
        "int4": ours("int4"),
        "fp4": ours("fp4"),
        "int4:16": ours("int4:16"),
        "fp4:16": ours("fp4:16"),
        "cluster:4": ours("cluster:4"),
    }


def measure_weights(say: Callable[[str], None]) -> list[Weights]:
    found = []
    for checkpoint, read in checkpoints():
        sums = dict.fromkeys(formats(), 0.0)
        bits, size, count = dict.fromkeys(sums, 0.0), 0.0, 0
        for weight in read():
            size, count = size + float(weight.double().square().sum()), count + weight.numel()
            for name, shrink in formats().items():
                got, each = shrink(weight)
                sums[name] += float((got - weight).double().square().sum())
                bits[name] += each * weight.numel()
        base = next(iter(sums.values()))
        for name, total in sums.items():
            row = (checkpoint, name, bits[name] / count, (total / size) ** 0.5, (total / base) ** 0.5 - 1)
            found.append(Weights(*row))
            say(f"{checkpoint}  {name}  {found[-1].error:.5f}  {found[-1].against_absmax:+.1%}")
    return found


def measure_model(
    model: str, plan: Plan, metric: str, quants: list[str], say: Callable[[str], None]
) -> Iterator[FormatResult]:
    """Measure every format of one model after every kind of calibration; equal rows judge all."""
    loaded = load.load(plan.with_(quant="int8"))
    load.fill(loaded)
    if loaded.module is None:
        raise SystemExit(f"{model} has no torch module")
    original, output = loaded.module.eval(), metric.partition(".")[0]
    batches = _batches(loaded.calibration)
    stats = {way: _calibrated(original, batches, way) for way in METHODS}
    expected = [_run(original, batch) for batch in _batches(loaded.samples)]
    for name in quants:
        for way in METHODS:
            own = plan.with_(quant=name)
            if stats[way] is None and compress.needs_stats(own):
                continue
            small, begin = copy.deepcopy(original), time.perf_counter()
            try:
                done = compress.quantize_model(small, own, stats=stats[way])
            except NotUsableError as error:
                say(f"{model}  {name}: {error}")
                break
            seconds = time.perf_counter() - begin
            bits = round(done.totals.bits, 4)
            comparison = Comparison(loaded.task)
            for want, batch in zip(expected, _batches(loaded.samples), strict=True):
                comparison.add({output: want}, {output: _run(small, batch)}, batch)
            every = {m.name: m.value for m in comparison.metrics()}
            figures = {key: float(every[key]) for key in SAID[model]}  # type: ignore[arg-type]
            yield FormatResult(model, name, way, float(bits or 0), seconds, figures)
            say(f"{model}  {name}  {way}  " + ", ".join(f"{k} {v:.5f}" for k, v in figures.items()))


def _calibrated(
    model: nn.Module, batches: list[dict[str, Tensor]], way: str
) -> Mapping[str, compress.Stats] | None:
    return None if way == "none" else compress.calibrate(model, batches, hessian=way == "gptq")


def _batches(samples: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    count = len(next(iter(samples.values())))
    return [{name: value[i : i + ROWS] for name, value in samples.items()} for i in range(0, count, ROWS)]


@torch.no_grad()
def _run(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return flatten(model(**batch))[0]


def verdicts(weights: list[Weights], judged: list[FormatResult]) -> list[tuple[bool, str]]:
    """Return the bars, one line each."""
    lines = []
    errors = {(row.checkpoint, row.format): row for row in weights}
    for checkpoint in dict.fromkeys(row.checkpoint for row in weights):
        for name in ("nf4", "nf4:16"):
            gain = errors[checkpoint, name].against_absmax
            text = f"{checkpoint}: {name} is {gain:+.1%} against absmax nf4; the bar is {-BAR:.0%}"
            lines.append((gain <= -BAR, text))
        if checkpoint in SAID:  # random weights are for reference
            lines.append(
                _against_iq4_nl(checkpoint, errors[checkpoint, "nf4:16"], errors[checkpoint, IQ4_NL])
            )
    known = {(row.model, row.quant, row.calibration): row for row in judged}
    for (model, name, way), row in known.items():
        plain = known.get((model, name, "none"))
        key = "kl" if "kl" in row.figures else "relative_error"
        if way == "gptq" and plain is not None and name in ("nf4", "int4", "fp4", *FINE, "cluster:4"):
            before, after = plain.figures[key], row.figures[key]
            lines.append((after < before, f"{model} {name}: {key} {before:.5f}, after gptq {after:.5f}"))
    return lines


def _against_iq4_nl(checkpoint: str, own: Weights, rival: Weights) -> tuple[bool, str]:
    gain = own.error / rival.error - 1
    same_bits = own.error * 2 ** (own.bits - rival.bits) / rival.error - 1
    bits = f"with {own.bits:.3f} bits for {rival.bits} ({same_bits:+.1%} at 6.02 dB for a bit)"
    text = f"{checkpoint}: nf4:16 is {gain:+.1%} against iq4_nl as GGUF makes it, {bits}"
    return gain <= -BAR, f"{text}; the bar is {-BAR:.0%}"


def markdown(weights: list[Weights], judged: list[FormatResult], lines: list[tuple[bool, str]]) -> str:
    text = [
        "| checkpoint | format | bits per weight | relative rms error | against absmax nf4 |",
        "|" + "---|" * 5,
    ]
    text += [
        f"| {w.checkpoint} | {w.format} | {w.bits:.3f} | {w.error:.5f} | {w.against_absmax:+.1%} |"
        for w in weights
    ]
    for model in dict.fromkeys(row.model for row in judged):
        keys = SAID[model]
        text += ["", f"| {model} | calibration | bits | " + " | ".join(keys) + " | seconds |"]
        text += ["|" + "---|" * (len(keys) + 4)]
        for row in (row for row in judged if row.model == model):
            figures = " | ".join(f"{row.figures[key]:.5f}" for key in keys)
            text.append(
                f"| {row.quant} | {row.calibration} | {row.bits:.3f} | {figures} | {row.seconds:.1f} |"
            )
    return "\n".join([*text, "", *(f"- {'ok' if ok else '**missed**'}: {line}" for ok, line in lines)]) + "\n"


def write(weights: list[Weights], judged: list[FormatResult]) -> bool:
    """Replace today's earlier figures by those measured now; return True if every bar is met."""
    path = result_path("quality")
    held = json.loads(path.read_text()) if path.exists() else {"weights": [], "models": []}
    if not weights:
        weights = msgspec.convert(held["weights"], list[Weights])
    new = {(row.model, row.quant, row.calibration) for row in judged}
    old = msgspec.convert(held["models"], list[FormatResult])
    judged = [row for row in old if (row.model, row.quant, row.calibration) not in new] + judged
    judged.sort(
        key=lambda row: (list(SAID).index(row.model), QUANTS.index(row.quant), METHODS.index(row.calibration))
    )
    lines = verdicts(weights, judged)
    head = machine_header()
    record = {**head, "weights": msgspec.to_builtins(weights), "models": msgspec.to_builtins(judged)}
    path.write_text(json.dumps(record, indent=1) + "\n")
    note = "Portable operators; seconds are of quantizing alone, on a machine that others used too.\n\n"
    path.with_suffix(".md").write_text(heading(head) + note + markdown(weights, judged, lines))
    return all(ok for ok, _ in lines)


def main() -> int:
    known = plans()
    parser = parser_of(__doc__)
    parser.add_argument("--parts", default="weights,models")
    parser.add_argument("--models", default=",".join(known))
    parser.add_argument("--quants", default=",".join(QUANTS))
    options = parser.parse_args()
    parts = options.parts.split(",")
    weights = measure_weights(progress) if "weights" in parts else []
    good = write(weights, [])
    for model in options.models.split(",") if "models" in parts else []:
        for row in measure_model(model, *known[model], options.quants.split(","), progress):
            good = write([], [row])
    print(result_path("quality").with_suffix(".md").read_text())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
