"""Rows of quality per bit: what a contender took and lost, the bars between them, and their tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from bench.shared import bars as bar_tables
from bench.shared.bars import Bar

OURS = "infer"
LOWEST, HIGHEST = 2.5, 6.0  # bits of the rivals that are bars
METRICS = {"kl": "KL, nats", "relative_error": "relative error"}
SCOPE_TEXTS = {"all": "all weights", "blocks": "blocks, embedding in float"}


class QualityRow(msgspec.Struct, kw_only=True):
    """One quantized form of one model. `bits` is None and `why` says the reason where there is none."""

    model: str
    scope: str  # a key of SCOPE_TEXTS
    contender: str
    name: str
    metric: str
    kind: str = ""  # of infer: "uniform" or "mixed"
    bits: float | None = None
    num_bytes: int | None = None
    figures: dict[str, float] = {}
    seconds: float | None = None
    why: str = ""

    @property
    def key(self) -> tuple[str, ...]:
        return self.model, self.scope, self.contender, self.name

    @property
    def loss(self) -> float:
        """The figure of the plot; infinite where nothing was measured."""
        return self.figures.get(self.metric, float("inf"))

    def line(self) -> str:
        """Return the row for the terminal."""
        begin = f"{self.model} {self.scope:6} {self.contender} {self.name:12}"
        if self.bits is None:
            return f"{begin} {self.why}"
        figures = ", ".join(f"{name} {value:.5g}" for name, value in self.figures.items())
        return f"{begin} {self.bits:.3f} bits  {figures}  {self.seconds or 0:.1f} s"


def best(rows: Iterable[QualityRow], bits: float) -> QualityRow | None:
    """Return the row of least loss at no more than so many bits."""
    fitting = [row for row in rows if row.bits is not None and row.bits <= bits + 1e-9]
    return min(fitting, key=lambda row: row.loss, default=None)


def bars(rows: Sequence[QualityRow]) -> list[Bar]:
    """Return a bar for each rival's result between `LOWEST` and `HIGHEST` bits."""
    found = []
    for rival in rows:
        if rival.contender == OURS or rival.bits is None or not LOWEST <= rival.bits <= HIGHEST:
            continue
        own = best((r for r in rows if r.contender == OURS and r.key[:2] == rival.key[:2]), rival.bits)
        made = Bar(
            work=f"{rival.model}, {SCOPE_TEXTS[rival.scope]}, {rival.bits:.2f} bits",
            rival=f"{rival.contender} {rival.name}",
            need=1.0, below=True, unit="of its error, at no more bits", theirs=rival.loss,
            why="" if own else "no result of infer at so few bits",
        )  # fmt: skip
        if own is not None:
            got = own.loss / rival.loss if rival.loss else float(own.loss > 0)
            made = msgspec.structs.replace(made, ours=own.loss, got=got, details={"compared": own.name})
        found.append(made)
    return sorted(found, key=lambda bar: bar.work)


def markdown(rows: Sequence[QualityRow]) -> str:
    """Return the bars, then every row, by model and scope."""
    parts = [bar_tables.table(bars(rows))]
    for model, scope in dict.fromkeys(row.key[:2] for row in rows):
        own = [row for row in rows if row.key[:2] == (model, scope)]
        parts += [f"{model}, {SCOPE_TEXTS[scope]}:\n", _table(own)]
    return "\n".join(parts)


def _table(rows: Sequence[QualityRow]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.figures))
    lines = [f"| contender | format | bits | bytes | {' | '.join(names)} |", "|" + "---|" * (len(names) + 4)]
    for row in sorted(rows, key=lambda row: (row.bits is None, row.bits or 0.0)):
        if row.bits is None:
            lines.append(f"| {row.contender} | {row.name} | {row.why} | |{' |' * len(names)}")
            continue
        figures = " | ".join(f"{row.figures[name]:.5g}" for name in names)
        lines.append(f"| {row.contender} | {row.name} | {row.bits:.3f} | {row.num_bytes:,} | {figures} |")
    return "\n".join(lines) + "\n"
