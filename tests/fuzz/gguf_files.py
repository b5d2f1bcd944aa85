"""Damaged GGUF files through the reader; `python -m tests.fuzz.gguf_files [SECONDS [FIRST_SEED]]`.

A sound file of a tiny model is changed in one to eight places: bytes, lengths, counts, pieces cut out or repeated, the
file cut off. Each one is opened, its tensors and codes are read. It ends as tensors, or as a refusal with a sentence.
Any other exception, or more than `MEMORY` bytes, makes the run fail.
"""

from __future__ import annotations

import random
import resource
import struct
import sys
import tempfile
from pathlib import Path

import gguf
import torch

from infer.errors import InferError
from infer.load.gguf.open_gguf import describe_gguf, open_gguf
from tests.fuzz.seeds import try_seeds
from tests.support import tiny_decoders
from tests.support.gguf_files import CODEBOOKS, write_gguf

MEMORY = 4 << 30  # bytes of address space beyond the start
KINDS = gguf.GGMLQuantizationType
TYPES = {
    "v_proj.weight": KINDS.Q8_0,
    "q_proj.weight": KINDS.Q5_0,
    "k_proj.weight": KINDS.Q5_1,
    "gate_proj.weight": KINDS.Q4_1,
    "norm.weight": KINDS.F32,
    "": KINDS.Q4_0,
}
ODD = (
    0,
    1,
    2,
    7,
    31,
    32,
    255,
    1 << 16,
    1 << 31,
    (1 << 31) - 1,
    (1 << 32) - 1,
    1 << 40,
    1 << 62,
    (1 << 64) - 1,
)


def sound(folder: Path) -> list[Path]:
    """Write sound files, one with blocks of 32 weights and one with codebooks."""
    paths = [folder / "blocks.gguf", folder / "codebooks.gguf"]
    write_gguf(paths[0], tiny_decoders.build("llama"), "llama", types=TYPES)
    wide = {**tiny_decoders.GROUPED, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
    wide |= {"num_hidden_layers": 1}
    write_gguf(paths[1], tiny_decoders.build("llama", sizes=wide), "llama", types=CODEBOOKS)
    return paths


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Return the file with one to eight changes; most lie in the header."""
    changed = bytearray(data)
    head = min(len(changed), 6000)
    for _ in range(rng.randint(1, 8)):
        at = rng.randrange(head if rng.random() < 0.85 else len(changed))
        way = rng.random()
        if way < 0.35:
            changed[at] = rng.randrange(256)
        elif way < 0.5:
            changed[at] ^= 1 << rng.randrange(8)
        elif way < 0.75:
            code = rng.choice("IQ")
            value = rng.choice(ODD) & (0xFFFFFFFF if code == "I" else 0xFFFFFFFFFFFFFFFF)
            changed[at : at + struct.calcsize(code)] = struct.pack(f"<{code}", value)
        elif way < 0.85:
            del changed[at : at + rng.randint(1, 64)]
        elif way < 0.95:
            piece = changed[at : at + rng.randint(1, 64)]
            changed[at:at] = piece
        else:
            del changed[rng.randrange(len(changed)) :]
        head = min(len(changed), 6000)
        if not changed:
            return b"GGUF"
    return bytes(changed)


def run(path: Path) -> str:
    """Open a file and read all of it; returns "read", or "refused" with the beginning of the sentence."""
    try:
        describe_gguf(path)
        source = open_gguf(path)
        for weight in source.weights.values():
            if torch.Size(weight.shape).numel() > 1 << 22:
                continue
            weight.read()
            codes = weight.codes()
            if codes is not None and not codes.refused:
                codes.rows(0, codes.shape[0])
    except InferError as error:
        return f"refused: {error.message[:40]}"
    return "read"


def main() -> int:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    with tempfile.TemporaryDirectory() as work:
        files, path = sound(Path(work)), Path(work) / "m.gguf"
        assert all(run(one) == "read" for one in files)
        sources = [one.read_bytes() for one in files]

        def attempt(seed: int) -> str:
            path.write_bytes(damaged(sources[seed % len(sources)], random.Random(seed)))
            return run(path)

        return try_seeds(attempt, 600)


if __name__ == "__main__":
    sys.exit(main())
