"""Error of nf4 weights on real checkpoints against bitsandbytes' nf4 and GGUF's iq4_nl.

`bench/quality/format_error.py` measures it, with rivals re-implemented from their published formats.
"""

from __future__ import annotations

from bench.quality import format_error
from bench.shared.bars import Bar
from bench.shared.results import progress

NAME = "nf4 weights"
# Ours, the rival, and the share of its error that ours may have. Both of the second pair have 4.5 bits a weight, ours
# also a float32 for each row.
PAIRS = (
    ("nf4", "nf4 absmax, 64, float32 (bitsandbytes)", 0.92),
    ("nf4:16", format_error.IQ4_NL, 0.92),
)


def measure() -> list[Bar]:
    """Measure relative rms errors over all matrices of each real checkpoint; random ones are not judged."""
    rows = format_error.measure_weights(progress)
    errors = {(row.checkpoint, row.format): row.error for row in rows}
    bars = []
    for checkpoint in dict.fromkeys(
        row.checkpoint for row in rows if not row.checkpoint.startswith("random")
    ):
        for own, rival, need in PAIRS:
            ours, theirs = errors[checkpoint, own], errors[checkpoint, rival]
            bars.append(
                Bar(
                    work=f"{NAME}, {checkpoint}",
                    rival=rival,
                    need=need,
                    got=ours / theirs,
                    unit="of its error",
                    below=True,
                    ours=ours,
                    theirs=theirs,
                )
            )
    return bars
