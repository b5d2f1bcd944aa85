"""Texts for measuring recovery: this Python's documentation and sources, without what samples.txt comes from."""

from __future__ import annotations

import random
import sys

from bench.shared.repository import ROOT

sys.path.insert(0, str(ROOT / "models"))
CHARACTERS = 2_500_000  # about 600 000 tokens of pydoc_lm
SENTENCES = 4000


def documents() -> list[str]:
    """Return training documents of pydoc_lm in a fixed order: all of the documentation, then code up to a limit."""
    import pydoc_lm

    kept = [document for document in pydoc_lm.corpus() if not document.held_out]
    random.Random(0).shuffle(kept)
    kept.sort(key=lambda document: document.kind == "code")
    found: list[str] = []
    for document in kept:
        if sum(map(len, found)) + len(document.text) <= CHARACTERS:
            found.append(document.text)
    random.Random(1).shuffle(found)
    return found


def sentences() -> list[str]:
    """Return paragraphs of documentation, none of them in `minilm.sentences`."""
    import minilm

    found = sorted(set(minilm._prose("\n\n".join(documents()))) - set(minilm.sentences()))
    return random.Random(0).sample(found, min(SENTENCES, len(found)))
