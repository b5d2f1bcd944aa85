"""Rows of one length that hold several token sequences, none of which sees another.

Positions start anew with each sequence. From them transformers makes a mask of blocks (and of windows inside of them),
so that a row gives what its sequences give alone; `packing_fault` checks that on the model at hand.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, insort
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from ...reporter import Reporter
from ...spec import Finding
from ..language_model import TrainableLanguageModel
from ..objective import IGNORED
from .rows import digest_of, shuffled
from .text import TokenSequence, read_text_data, split_documents

SAME = 1e-2  # relative difference of logits, for kernels whose sums depend on the shape


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return bins of indices whose lengths sum to at most `room`, by best-fit decreasing (Johnson 1973).

    Of equal lengths the first comes first, so that the bins depend on nothing but the lengths.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(free, (lengths[index], -1))
        if place == len(free):
            bins.append([])
            left, number = room, len(bins) - 1
        else:
            left, number = free.pop(place)
        bins[number].append(index)
        insort(free, (left - lengths[index], number))
    return bins


class SequenceRows:
    """Rows of token sequences; a batch has `input_ids`, `position_ids` and `labels`, int64 [rows, longest].

    A label is the token that follows, or -100 where it is not trained, or belongs to no or another sequence.
    """

    def __init__(self, sequences: Sequence[TokenSequence], length: int, pad: int, *, packed: bool) -> None:
        lengths = [len(one.ids) for one in sequences]
        groups = pack(lengths, length) if packed else [[index] for index in range(len(lengths))]
        self.rows = [[sequences[index] for index in group] for group in groups]
        self.pad = pad

    def __len__(self) -> int:
        return len(self.rows)

    def order(self, seed: int, epoch: int) -> Sequence[int]:
        return shuffled(len(self), seed, epoch)

    def batch(self, numbers: Sequence[int]) -> dict[str, Tensor]:
        rows = [self.rows[number] for number in numbers]
        longest = max(sum(len(one.ids) for one in row) for row in rows)
        shape = (len(rows), longest)
        ids = torch.full(shape, self.pad, dtype=torch.int64)
        labels = torch.full(shape, IGNORED, dtype=torch.int64)
        positions = torch.zeros(shape, dtype=torch.int64)
        for i, row in enumerate(rows):
            start = 0
            for one in row:
                stop = start + len(one.ids)
                ids[i, start:stop] = torch.tensor(one.ids)
                wanted = [
                    token if kept else IGNORED for token, kept in zip(one.ids, one.trained, strict=True)
                ]
                labels[i, start : stop - 1] = torch.tensor(wanted[1:])
                positions[i, start:stop] = torch.arange(len(one.ids))
                start = stop
            positions[i, start:] = torch.arange(longest - start)
        return {"input_ids": ids, "position_ids": positions, "labels": labels}

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(len(one.ids) for row in self.rows for one in row)

    @property
    def trained_tokens(self) -> int:
        """Tokens that are predicted in training."""
        return sum(sum(one.trained[1:]) for row in self.rows for one in row)

    @property
    def digest(self) -> str:
        every = [one for row in self.rows for one in row]
        ids = torch.tensor([token for one in every for token in one.ids])
        trained = torch.tensor([kept for one in every for kept in one.trained])
        sizes = torch.tensor([len(row) for row in self.rows] + [len(one.ids) for one in every])
        return digest_of({"ids": ids, "trained": trained, "sizes": sizes})


@torch.no_grad()
def packing_fault(model: nn.Module, vocab: int) -> str | None:
    """Say why several sequences can't share a row of this model; None where a sequence's logits stay its own.

    `model`: a causal language model of transformers, in evaluation mode.
    """
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return f"{type(model).__name__} takes no position_ids"
    generator = torch.Generator().manual_seed(0)
    one, two = (
        TokenSequence(torch.randint(vocab, (size,), generator=generator).tolist(), [True] * size)
        for size in (7, 9)
    )
    device = next(model.parameters()).device
    together = SequenceRows([two, one], 16, 0, packed=True).batch([0])
    alone = SequenceRows([one], 16, 0, packed=False).batch([0])

    def logits(batch: dict[str, Tensor]) -> Tensor:
        named = {name: batch[name].to(device) for name in ("input_ids", "position_ids")}
        return model(**named, use_cache=False).logits.float()

    expected, found = logits(alone)[0], logits(together)[0, 9:]
    error = float((found - expected).norm() / expected.norm().clamp_min(1e-30))
    if error <= SAME:
        return None
    return f"logits change by {error:.0%} when another sequence stands before one in its row"


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
