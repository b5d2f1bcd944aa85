"""Languages of translation models: which special tokens are theirs, and where a source's stands."""

from __future__ import annotations

import pytest

from infer.errors import InputError
from infer.llm.text.languages import language_id, languages, with_source_language


def test_language_tokens_of_all_spellings_are_recognized() -> None:
    special = {
        0: "<s>",
        3: "<en>",
        5: "deu_Latn",
        6: "zho_Hans",
        7: "de_DE",
        8: "__de__",
        9: "__ceb__",
        4: "mask_A",
    }
    assert languages(special) == {"deu_Latn": 5, "zho_Hans": 6, "de_DE": 7, "de": 8, "ceb": 9}


def test_a_language_is_found_by_its_name_or_refused_with_the_nearest() -> None:
    known = {"de": 8, "ceb": 9}
    assert [language_id(known, name, "tgt_lang") for name in ("de", "__de__")] == [8, 8]
    with pytest.raises(InputError, match=r"one of the 2 languages of this model \(de, ceb\), got") as caught:
        language_id(known, "cebu", "tgt_lang")
    assert (caught.value.where, caught.value.hint) == ("tgt_lang", "Did you mean ceb?")
    with pytest.raises(InputError, match="has no tokens for languages"):
        language_id({}, "de", "src_lang")


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([8, 50, 51, 2], [9, 50, 51, 2]),  # NLLB, M2M100
        ([50, 51, 2, 8], [50, 51, 2, 9]),  # mBART
        ([50, 8, 51, 52, 2], [9, 50, 8, 51, 52, 2]),  # within a text it is a word
        ([50], [9, 50]),
    ],
)
def test_the_source_language_token_is_placed_as_by_the_tokenizer(ids: list[int], expected: list[int]) -> None:
    assert with_source_language(ids, {"de": 8, "ceb": 9}, 9) == expected
