"""docs/gpu.md: its predictions are those of today's kernels, and the tests that it names exist."""

from __future__ import annotations

import re

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


def test_every_fault_names_tests_that_exist() -> None:
    section = predicted_steps.PAGE.read_text().split("## Faults found without a card")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*\| (.+) \|$", section, flags=re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 18))
    for number, named in rows:
        found = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", named)
        assert found, f"fault {number} has no test"
        for path, name in found:
            text = (predicted_steps.ROOT / path).read_text()
            assert re.search(rf"^(async )?def {name}\(", text, flags=re.MULTILINE), f"{path} has no {name}"
