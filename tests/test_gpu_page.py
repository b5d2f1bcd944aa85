"""The predictions of docs/gpu.md are those of today's kernels."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")
from bench.gpu import predicted_steps  # noqa: E402


def test_the_page_holds_the_predictions_of_the_kernel_table() -> None:
    page = predicted_steps.PAGE.read_text()
    assert predicted_steps.with_table(page) == page, "run `python -m bench.gpu.predicted_steps --write`"


def test_more_sequences_give_more_tokens_and_fewer_bytes_take_less_time() -> None:
    found = {
        c.kernel: c for c in predicted_steps.kernel_table.read(predicted_steps.TABLE) if c.capability == 90
    }
    one, eight = (
        predicted_steps.predict(predicted_steps.SHAPES["8B"], "bfloat16", batch, found) for batch in (1, 8)
    )
    assert 1 / one.seconds < 8 / eight.seconds
    assert one.num_bytes == pytest.approx(15.3e9, rel=0.03)
    packed = predicted_steps.predict(predicted_steps.SHAPES["8B"], "nf4", 1, found)
    assert packed.seconds < one.seconds
    assert 0 < packed.share < one.share < 1
