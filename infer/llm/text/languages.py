"""Languages of a translation model: the special tokens that its tokenizer has for them.

NLLB spells them `deu_Latn`, mBART `de_DE`, M2M100 `__de__`; the last may be named without the underscores. The source's
token stands where the tokenizer put one, the target's is what the decoder is made to begin with, as the translation
pipeline of transformers has both (`src_lang`, `tgt_lang`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence

from ...errors import InputError

_CODE = re.compile(r"[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2,3}_[A-Z]{2}|__([a-z]{2,3})__")
_SHOWN = 12  # languages in a message


def languages(special: Mapping[int, str]) -> dict[str, int]:
    """Return the token id of each language among special tokens, by its name, in the order of the ids."""
    found = {}
    for number, text in sorted(special.items()):
        if match := _CODE.fullmatch(text):
            found[match[1] or text] = number
    return found


def language_id(known: Mapping[str, int], name: str, field: str) -> int:
    """Return the token id of a language.

    Raises `InputError` for one that the tokenizer does not know, with the nearest.
    """
    code = name.strip("_") if name.startswith("__") else name
    if code in known:
        return known[code]
    if not known:
        raise InputError(
            "the tokenizer of this model has no tokens for languages",
            where=field,
            hint="Leave it out; models such as T5 and some of Marian read the language in the text itself",
        )
    near = difflib.get_close_matches(code, known, n=1)
    shown = ", ".join(list(known)[:_SHOWN]) + (", …" if len(known) > _SHOWN else "")
    raise InputError(
        f"expected one of the {len(known)} languages of this model ({shown}), got {name[:64]!r}",
        where=field,
        hint=f"Did you mean {near[0]}?" if near else "",
    )


def with_source_language(ids: Sequence[int], known: Mapping[str, int], language: int) -> list[int]:
    """Return the token ids of a source with the token of its language, put first where none stands at either end."""
    tokens, numbers = list(ids), set(known.values())
    ends = [i for i in (0, len(tokens) - 2, len(tokens) - 1) if i >= 0 and tokens[i] in numbers]
    if not ends:
        return [language, *tokens]
    tokens[ends[0]] = language
    return tokens
