"""Padded texts in batches of like length: every row once, nothing but padding cut."""

from __future__ import annotations

import torch
from torch import Tensor

from infer.tune.data.rows import PaddedRows, is_padded_text

COUNT, TOKENS = 203, 64


def texts() -> dict[str, Tensor]:
    make = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, TOKENS + 1, (COUNT,), generator=make)
    mask = (torch.arange(TOKENS) < lengths[:, None]).long()
    return {"input_ids": torch.arange(COUNT)[:, None] * mask, "attention_mask": mask}


def test_an_epoch_of_padded_rows_has_every_row_once_in_another_order() -> None:
    rows = PaddedRows(texts(), 8)
    first, second = rows.order(3, 0), rows.order(3, 1)
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert list(first) != list(second)
    assert list(PaddedRows(texts(), 8).order(3, 0)) == list(first), "a resumed run has the same order"


def test_batches_of_padded_rows_lose_only_padding() -> None:
    rows, given = PaddedRows(texts(), 8), texts()
    order, kept = rows.order(0, 0), 0
    for start in range(0, COUNT, 8):
        numbers = order[start : start + 8]
        batch = rows.batch(numbers)
        assert int(batch["attention_mask"].sum()) == int(given["attention_mask"][list(numbers)].sum())
        kept += batch["input_ids"].numel()
    real = int(given["attention_mask"].sum())
    assert kept < 1.3 * real < 0.8 * COUNT * TOKENS


def test_texts_with_other_inputs_or_left_padding_are_not_cut() -> None:
    given = texts()
    assert is_padded_text(given)
    assert not is_padded_text({**given, "pixels": torch.zeros(COUNT, 3, 8, 8)})
    assert not is_padded_text({name: tensor.flip(1) for name, tensor in given.items()})
    assert not is_padded_text({"input_ids": given["input_ids"]})
