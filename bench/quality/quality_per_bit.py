"""Quality against bits per weight of infer, llama.cpp with an importance matrix, auto-round and GPTQModel.

    python -m bench.quality.quality_per_bit [--models pydoc_lm,minilm] [--scopes all,blocks]
        [--only 'infer*;llama.cpp Q4*'] [--peers PYTHON] [--render]

All quantize the same float model, calibrate on the same rows and are judged on the same held-out rows, without any
training afterwards; weights are decoded to float32 and take the place of the float ones in transformers. Bits are all
stored bytes of the scope over its weights: "all" is every parameter, the tied head once, "blocks" the matrices of the
blocks beside a float embedding, which is all that auto-round and GPTQModel quantize. Each rival result is a bar: the
best of infer at no more bits must be on or below it. `--peers` is a Python with auto-round and GPTQModel, which need
an environment of their own. Writes bench/results/quality-per-bit-DATE-CPU.json, .md and .svg, where rows that were not
measured again stay, and docs/quality-per-bit.svg; exits 1 when a bar between 2.5 and 6 bits is missed.
"""

from __future__ import annotations

import fnmatch
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from bench.llm import llama_cpp_model
from bench.quality import llama_cpp_quantization, peer_quantization
from bench.quality.infer_quantization import UNIFORM, InferQuantization, square_means
from bench.quality.quality_per_bit_plot import plot
from bench.quality.quality_per_bit_rows import HIGHEST, LOWEST, OURS, QualityRow, bars, markdown
from bench.quality.reference_models import MODELS, ReferenceModel
from bench.shared import results_page
from bench.shared.child_process import EngineCrashed
from bench.shared.command_line import parser_of
from bench.shared.repository import ROOT
from bench.shared.results import TodaysRows, progress
from infer import compress

NAME = "quality-per-bit"
PLOT = ROOT / "docs" / "quality-per-bit.svg"
SCOPES = ("all", "blocks")
BUDGETS = (2.5, 3, 3.5, 4, 4.25, 4.5, 5, 5.5, 6)
Say = Callable[[str], None]
Wanted = Callable[[str], bool]  # by "CONTENDER NAME"


def measure(
    model: ReferenceModel,
    scopes: list[str],
    wanted: Wanted,
    known: Mapping[tuple[str, ...], QualityRow],
    peers: Path | None,
    say: Say,
) -> Iterator[QualityRow]:
    """Yield the rows of one model: rivals, then infer at its own budgets and at the bits of each rival.

    `known` holds every row so far, those that are yielded among them.
    """
    with tempfile.TemporaryDirectory() as work:
        means = square_means(compress.calibrate(model.module, model.batches()))
        for scope in scopes:
            yield from _rivals(model, scope, means, wanted, peers, Path(work), say)
    settings = [
        (scope, *setting)
        for scope in scopes
        for setting in _settings(model, scope, known.values())
        if wanted(f"{OURS} {setting[0]}")
    ]
    if settings:
        begin = time.monotonic()
        stats = compress.calibrate(
            model.module, model.batches(), hessian=True, outputs=[model.output], task=model.task
        )
        say(f"{model.name}: calibrated in {time.monotonic() - begin:.0f} s")
        ours = InferQuantization(model, stats, say)
        parts = {scope: ours.of_scope(scope) for scope in scopes}
        for scope, name, kind, size in settings:
            yield _own_row(parts[scope], name, kind, size, say)


def _settings(
    model: ReferenceModel, scope: str, known: Iterable[QualityRow]
) -> Iterator[tuple[str, str, int | None]]:
    """Yield name, kind and bytes of the forms of infer; a uniform one takes what it takes."""
    for format in UNIFORM:
        yield format, "uniform", None
    sizes = {int(bits * model.count(scope) / 8) for bits in BUDGETS}
    for row in known:
        if row.key[:2] == (model.name, scope) and row.contender != OURS and row.bits is not None:
            sizes |= {row.num_bytes} if row.num_bytes and LOWEST <= row.bits <= HIGHEST else set()
    for size in sorted(sizes):
        yield f"{size * 8 / model.count(scope):.3f} bits", "mixed", size


def _rivals(
    model: ReferenceModel, scope: str, means: dict[str, Tensor], wanted: Wanted,
    peers: Path | None, work: Path, say: Say,
) -> Iterator[QualityRow]:  # fmt: skip
    matrix = llama_cpp_quantization.importance(model, means)
    threads = torch.get_num_threads()
    makers: dict[tuple[str, str], Callable[[], tuple[dict[str, Tensor], int]]] = {}
    for kind in llama_cpp_quantization.TYPES:
        makers["llama.cpp", kind] = partial(
            llama_cpp_quantization.contender, model, kind, scope, matrix, work, threads
        )
    for setting in peer_quantization.SETTINGS:
        makers[setting.package, setting.name] = partial(
            peer_quantization.contender, model, setting, scope, peers, work
        )
    for (contender, name), make in makers.items():
        if wanted(f"{contender} {name}"):
            yield _row(model, scope, contender, name, say, make)


def _row(
    model: ReferenceModel,
    scope: str,
    contender: str,
    name: str,
    say: Say,
    make: Callable[[], tuple[dict[str, Tensor], int]],
) -> QualityRow:
    begin = time.monotonic()
    row = QualityRow(model=model.name, scope=scope, contender=contender, name=name, metric=model.metric)
    try:
        weights, size = make()
    except (EngineCrashed, RuntimeError, ValueError, OSError) as error:
        row = msgspec.structs.replace(row, why=str(error).strip().splitlines()[-1][:300])
    else:
        figures = model.judge(weights)
        row = _filled(row, model, size, figures, begin)
    say(row.line())
    return row


def _filled(
    row: QualityRow, model: ReferenceModel, size: int, figures: dict[str, float], begin: float
) -> QualityRow:
    return msgspec.structs.replace(
        row, num_bytes=size, bits=size * 8 / model.count(row.scope), figures=figures,
        seconds=time.monotonic() - begin,
    )  # fmt: skip


def _own_row(ours: InferQuantization, name: str, kind: str, size: int | None, say: Say) -> QualityRow:
    model, begin = ours.model, time.monotonic()
    row = QualityRow(
        model=model.name, scope=ours.scope, contender=OURS, kind=kind, name=name, metric=model.metric
    )
    formats = ours.uniform(name) if size is None else ours.within(size)
    if formats is None:
        row = msgspec.structs.replace(row, why="the smallest formats take more")
    else:
        row = _filled(row, model, ours.num_bytes(formats), ours.judge(formats), begin)
    say(row.line())
    return row


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--scopes", default=",".join(SCOPES))
    parser.add_argument("--only", default="*", help="patterns of CONTENDER NAME, joined by ;")
    parser.add_argument("--peers", type=Path, help="Python of the environment of auto-round and GPTQModel")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--render", action="store_true", help="measure nothing, write the files again")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    table = TodaysRows(NAME, QualityRow, markdown, threads=given.threads)
    table.head["versions"] |= llama_cpp_model.versions() | peer_quantization.versions(given.peers)
    rows = {row.key: row for row in table.read()}
    for name in [] if given.render else given.models.split(","):
        for row in measure(
            MODELS[name](), given.scopes.split(","),
            lambda text: any(fnmatch.fnmatch(text, part) for part in given.only.split(";")),
            rows, given.peers, progress,
        ):  # fmt: skip
            rows[row.key] = row
            PLOT.write_text(plot(table.keep([row])))
    if given.render and rows:
        PLOT.write_text(plot(table.keep([])))
    results_page.write()
    print(markdown(list(rows.values())))
    return 0 if all(bar.is_met for bar in bars(list(rows.values()))) else 1


if __name__ == "__main__":
    sys.exit(main())
