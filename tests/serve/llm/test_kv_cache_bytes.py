"""Prediction of the engine's KV-cache size by the server process, which imports no torch."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from infer import device as hardware
from infer.attention import KV_DTYPES
from infer.llm.engine.cache import block_manager
from infer.llm.engine.cache.cache_sizing import CacheSizes
from infer.llm.engine.scheduling.engine_limits import EngineLimits
from infer.llm.step.step_shape import StepShape
from infer.serve.observability.memory import ENOUGH_TOKENS, ITEM_BYTES, STATE_ROWS, cache_bytes

SIZES = {"layers": 3, "query_heads": 6, "kv_heads": 2, "head_dim": 40, "vocab_size": 100}


def model(folder: Path, shape: StepShape, device: str = "cpu") -> Path:
    card = {"device": device, "meta": {"generation": msgspec.to_builtins(shape)}}
    (folder / "manifest.json").write_text(json.dumps(card))
    return folder


def test_every_kv_dtype_has_an_item_size() -> None:
    assert set(ITEM_BYTES) == set(KV_DTYPES)
    assert ENOUGH_TOKENS == block_manager.ENOUGH_TOKENS


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("free", [1 << 20, 64 << 30])
@pytest.mark.parametrize("positions", [256, 1 << 17])
def test_predicted_cache_size_equals_the_engine_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, free: int, positions: int
) -> None:
    shape = StepShape(**SIZES, max_positions=positions, kv_dtype=dtype)
    monkeypatch.setattr(hardware, "memory_available", lambda device: free)
    expected = block_manager.default_budget(shape.layers * shape.page_bytes, shape.page, positions)
    assert cache_bytes(model(tmp_path, shape), None, free) == expected


def test_states_of_all_sequences_count(tmp_path: Path) -> None:
    shape = StepShape(**SIZES, max_positions=256, state_layers=2, state_floats=1000)
    sizes = CacheSizes.divide(shape, EngineLimits(), None, "cpu")
    assert sizes.state_rows == STATE_ROWS
    assert cache_bytes(model(tmp_path, shape), None, 1 << 40) == block_manager.default_budget(
        shape.layers * shape.page_bytes, shape.page, 256, state_bytes=STATE_ROWS * shape.state_bytes
    )


def test_requested_cache_size_is_used(tmp_path: Path) -> None:
    shape = StepShape(**SIZES, max_positions=256)
    assert cache_bytes(model(tmp_path, shape), 12345, 1 << 40) == 12345


def test_gpu_models_need_no_ram_for_the_cache(tmp_path: Path) -> None:
    shape = StepShape(**SIZES, max_positions=256)
    assert cache_bytes(model(tmp_path, shape, "cuda"), 12345, 1 << 40) == 0
