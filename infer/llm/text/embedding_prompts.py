"""Prompts of embedding models: text put before an input, as the model was trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import InputError
from .tokenizer import TextOrPair


def with_prompt(
    texts: Sequence[TextOrPair], meta: Mapping[str, Any], name: str | None = None
) -> list[TextOrPair]:
    """Return the texts as the model reads them: after its prompt, and in lower case where it was trained so.

    `meta`: of the manifest; `name`: of the prompt, by default the model's default prompt, which few have. Pairs get
    no prompt. Raises `InputError` for a name that the model does not know.
    """
    known = meta.get("prompts") or {}
    chosen = meta.get("default_prompt") if name is None else name
    if chosen is not None and chosen not in known:
        raise InputError(
            f"expected a prompt of {', '.join(known) or 'this model, which has none'}, got {chosen!r}",
            where="prompt_name",
        )
    prompt = known[chosen] if chosen is not None else ""
    found: list[TextOrPair] = [prompt + text if isinstance(text, str) else text for text in texts]
    return [in_lower_case(text) for text in found] if meta.get("lower_case") else found


def in_lower_case(text: TextOrPair) -> TextOrPair:
    """Return a text or pair in lower case, character by character as tokenizers do it."""
    if isinstance(text, str):
        return "".join([character.lower() for character in text])
    return [str(in_lower_case(part)) for part in text]
