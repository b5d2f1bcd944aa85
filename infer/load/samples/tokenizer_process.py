"""Process that tokenizes the texts of a foreign tokenizer: one whose normalizer grows the text takes all memory.

It reads from stdin {"tokenizer": path, "texts": [text or pair], "limit": tokens or null} and writes [[ids, types], …].
It imports no more of `infer` than what confines it, so that it starts in a moment: `tokens_of` is the other side.
"""

from __future__ import annotations

import json
import sys

from infer.process.child import confine, end_with_parent


def main(parent: int, memory: int, seconds: int) -> int:
    """Answer one request within so many bytes of memory and seconds of the CPU."""
    import tokenizers

    end_with_parent(parent)
    asked = json.load(sys.stdin)
    with open(asked["tokenizer"], "rb") as file:
        tokenizer = tokenizers.Tokenizer.from_buffer(file.read())
    confine(addresses=memory, cpu_seconds=seconds)
    tokenizer.no_padding()
    limit = asked["limit"]
    tokenizer.no_truncation() if limit is None else tokenizer.enable_truncation(limit)
    texts = [tuple(text) if isinstance(text, list) else text for text in asked["texts"]]
    rows = [(encoding.ids, encoding.type_ids) for encoding in tokenizer.encode_batch(texts)]
    json.dump(rows, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
