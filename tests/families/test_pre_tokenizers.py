"""Pre-tokenizers that GGUF files name: a text is split as llama.cpp 0.5.0-dev splits it."""

from __future__ import annotations

import pytest

from infer import families

# First name of each way to split → the pieces of TEXT, joined by "|".
PIECES = {
    "gpt-2": "It|'|S| 1234|x| aBCd|'s| naïve|,| 中文|!|ab| `//|\n\n\n| e|́",
    "smollm": "It|'|S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!|ab| `//|\n\n\n| e|́",
    "llama-bpe": "It|'S| |123|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| e|́",
    "dbrx": "It|'S| |123|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| e|́",
    "qwen2": "It|'S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| e|́",
    "stablelm2": "It|'S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| e|́",
    "tekken": "It|'S| |1|2|3|4|x| a|BCd|'s| naïve|,| 中文|!ab| `//\n\n\n| é",
    "qwen35": "It|'S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| é",
    "gpt-4o": "It'S| |123|4|x| a|BCd's| naïve|,| 中文|!ab| `//\n\n\n| é",
    "seed-coder": "It|'S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!ab| `//|\n\n\n| e|́",
    "bailingmoe": "It|'S| |1|2|3|4|x| aBCd|'s| naïve|,| 中文|!ab| `//\n\n\n| e|́",
    "deepseek-v3": "It|'S| |123|4|x| aBCd|'s| naïve|,| |中文|!ab| `//\n\n\n| é",
    "deepseek-coder": "It|'|S| |1|2|3|4|x| aBCd|'|s| naïve|,| |中文|!|ab| `|//|\n|\n|\n| e|́",
    "falcon": "It|'|S| |123|4|x| aBCd|'|s| naïve|,| 中文|!|ab| |`//|\n\n\n| e|́",
    "default": "It|'|S| |123|4|x| aBCd|'|s| naïve|,| 中文|!|ab| `|//|\n\n\n| e|́",
    "poro-chat": "It'S| 1234x| aBCd's| naïve|,| 中文|!|ab| `//|\n\n\n| é",
    "viking": "It'S| |1|2|3|4|x| aBCd's| naïve|,| 中文|!|ab| `//|\n\n\n| é",
}
TEXT = "It'S 1234x aBCd's naïve, 中文!ab `//\n\n\n e\u0301"


@pytest.mark.parametrize("name", PIECES)
def test_a_text_is_split_as_llama_cpp_splits_it(name: str) -> None:
    found = families.known().pre_tokenizers[name].build().pre_tokenize_str(TEXT)
    assert "|".join(TEXT[start:stop] for _, (start, stop) in found) == PIECES[name]
    assert PIECES[name].replace("|", "") == TEXT


def test_every_way_to_split_is_tested() -> None:
    known = families.known().pre_tokenizers
    assert {known[name] for name in PIECES} == set(known.values())
