"""A tiny decoder whose tokens are bytes, and chats to train it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.llm_artifacts import bytes_as_tokens
from tests.support.tiny_decoders import build

WORDS = ["red", "blue", "green", "black", "white", "grey", "pink", "gold"]


def source(folder: Path, name: str = "llama", **changes: Any) -> Path:
    """Write a random decoder with a token for each byte and a template."""
    build(name, **changes).save_pretrained(folder)
    bytes_as_tokens(folder)
    return folder


def chats(path: Path, count: int = 24) -> Path:
    """Write chats whose answer is the word asked for, backwards."""
    lines = []
    for number in range(count):
        word = WORDS[number % len(WORDS)]
        turns = [{"role": "user", "content": word}, {"role": "assistant", "content": word[::-1]}]
        more = [{"role": "user", "content": "again"}, {"role": "assistant", "content": word}]
        lines.append(json.dumps({"messages": turns + (more if number % 3 == 0 else [])}))
    path.write_text("\n".join(lines) + "\n")
    return path
