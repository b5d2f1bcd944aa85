"""Rotary frequencies that depend on the length stay those of short sequences, and the context ends there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from infer import Plan, load
from tests.support.tiny_decoders import GROUPED, build

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give
LONG: dict[str, Any] = {
    **{"rope_type": "longrope", "original_max_position_embeddings": 40},
    **{"short_factor": [1.0 + i / 9 for i in range(8)], "long_factor": [2.0 + i for i in range(8)]},
}
CASES = {
    "dynamic": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 256),
    "longrope": ("phi3", {"rope_scaling": LONG, "original_max_position_embeddings": 40}, 40),
}


@pytest.mark.parametrize("case", CASES)
def test_the_context_is_bounded_where_rope_frequencies_change(case: str, tmp_path: Path) -> None:
    name, changes, longest = CASES[case]
    model = build(name, sizes={**GROUPED, **changes})
    model.save_pretrained(tmp_path)
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    load.fill(loaded)
    assert loaded.sizes["seq"][1] == longest
    found = next(finding for finding in loaded.findings if finding.what == "context")
    assert (found.value, case in found.why) == (longest, True)
    ids = torch.randint(3, 320, (1, 24))
    with torch.no_grad():
        model(input_ids=torch.randint(3, 320, (1, 60)))  # leaves other frequencies behind
        torch.testing.assert_close(loaded.module(ids), model(input_ids=ids, use_cache=False).logits)
        before = loaded.module.model.model.rotary_emb.inv_freq.clone()
        loaded.module(torch.randint(3, 320, (1, 300)))
        assert torch.equal(loaded.module.model.model.rotary_emb.inv_freq, before)


def test_the_context_ends_where_a_dynamic_mask_drops_keys(tmp_path: Path) -> None:
    build("doge", keep_window_size=40).save_pretrained(tmp_path)
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    found = next(finding for finding in loaded.findings if finding.what == "context")
    assert (loaded.sizes["seq"][1], found.value, "dynamic mask" in found.why) == (40, 40, True)


def test_a_model_with_plain_positions_keeps_its_context(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    loaded = load.load(Plan(source=str(tmp_path), data="random"))
    assert not any(finding.what == "context" for finding in loaded.findings)
