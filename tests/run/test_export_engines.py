"""Exports opened by the engines of their formats, where these are installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.llm import exported_gguf
from tests.support.decoder_folders import ARCHITECTURES, checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers has many to give


@pytest.mark.parametrize("case", ["llama", "qwen3"])
def test_llama_cpp_gives_the_ids_and_perplexity_of_the_source(case: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    row = exported_gguf.measure(checkpoint(tmp_path, case, **ARCHITECTURES[case]), "F32", tmp_path, 1)
    assert row["texts with other ids"] == []
    assert row["llama.cpp"] == pytest.approx(row["transformers"], rel=exported_gguf.EQUAL)
