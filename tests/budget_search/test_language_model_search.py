"""A search for a language model: times of tokens, memory with its KV cache, KV types tried on the best trial."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

import infer
from infer import Budgets, Plan
from infer.artifact import store
from infer.budget_search.trial_process import session
from infer.report.measurements.memory import Memory
from infer.report.search_tables import rows
from tests.support.tiny_decoders import build

MEMORY = 100_000_000  # of a fresh process, as if it had been measured


@pytest.mark.slow
@pytest.mark.usefixtures("in_process")
def test_a_language_model_is_searched_with_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = SimpleNamespace(probe=lambda *_, **__: Memory(peak=MEMORY))
    monkeypatch.setattr(session, "ForkingProbe", lambda: measured)
    build("llama").save_pretrained(tmp_path / "llama")
    plan = Plan(source=str(tmp_path / "llama"), data="random", batches=(1, 2), device="cpu", max_length=64)
    budgets = Budgets(
        max_memory=2_000_000_000,
        sequences="8x128",
        objective="latency",
        space={"backend": ("eager", "openvino"), "quant": ("none",)},
        fresh=True,
    )
    result = infer.search(plan, budgets, tmp_path / "best.infer")
    by_label = {trial.candidate.label: trial for trial in result.trials}
    floating = by_label["eager float"].measured
    assert floating is not None
    assert set(floating.seconds) == {1, 2}
    assert floating.first_token is not None
    assert floating.first_token > 0
    assert by_label["openvino float"].record.outcome == "skipped"
    assert "can't generate" in by_label["openvino float"].record.reason
    for label in ("eager float, KV float16", "eager float, KV int8"):
        found = by_label[label].measured
        assert found is not None
        assert found.kv_bytes_per_token is not None
        if by_label[label].record.outcome == "published":
            assert found.kv_bytes_per_token < (floating.kv_bytes_per_token or 0)
            assert found.memory_with_cache(8, 128) < floating.memory_with_cache(8, 128)  # type: ignore[operator]
    assert floating.memory_with_cache(8, 128) == MEMORY + 8 * 128 * (floating.kv_bytes_per_token or 0)
    assert store.read_manifest(result.path).meta["generation"]["kv_dtype"]
    assert len(rows(result.record)) == len(result.trials)
