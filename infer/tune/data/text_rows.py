"""Rows of tokens of a language model, read from text or chats, with some set aside."""

from __future__ import annotations

from pathlib import Path

from ...reporter import Reporter
from ...spec import Finding
from ..language_model import TrainableLanguageModel
from .packed_sequences import SequenceRows, packing_fault
from .sequences import read_text_data, split_documents


def text_rows(
    base: TrainableLanguageModel,
    path: str,
    length: int | None,
    seed: int,
    share: float,
    reporter: Reporter,
    *,
    packing: bool = True,
) -> tuple[SequenceRows, SequenceRows | None]:
    """Read the data at `path`, set `share` of it aside, and say what came of it; return rows to train on and held out.

    `length` are the tokens of a row, by default 1024 or what the model takes.
    """
    length = base.length(length)
    reporter.step("data", path)
    data = read_text_data(Path(path), base.tokenizer, base.template, length, base.end)
    fault = packing_fault(base.model.eval(), base.vocab) if packing else None
    packed = packing and fault is None
    sequences, aside = split_documents(data, share, seed)
    rows = SequenceRows(sequences, length, base.end or 0, packed=packed)
    held_out = SequenceRows(aside, length, base.end or 0, packed=packed) if aside else None
    full = rows.tokens / (len(rows) * length)
    why = f"{len(sequences)} sequences, {full:.0%} of {length} tokens each"
    found = [
        Finding("data", "rows", len(rows), "rows", why),
        Finding("data", "trained tokens", rows.trained_tokens, "tokens", f"of {rows.tokens}"),
        Finding("data", "held out", len(aside), "sequences", "measured, never trained on"),
    ]
    if fault is not None:
        found.append(Finding("data", "packing", False, why=fault))
    if data.cut:
        found.append(Finding("data", "cut", data.cut, "sequences", f"longer than --length {length}"))
    reporter.found(found)
    return rows, held_out
