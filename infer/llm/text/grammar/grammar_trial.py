"""A grammar compiled and walked through in a process of its own, before the model's process compiles it.

The process is limited in memory here and killed by its parent when its time is over; what it survived costs the model's
process no more. A walk takes random tokens out of the masks, so that limits which are met after some tokens, and masks
that take long, are found before the first token of an answer.
"""

from __future__ import annotations

import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import msgspec

from ....errors import GrammarError
from ....process.child import confine
from .grammar_compiler import GrammarCompiler, brief
from .grammar_request import named

WALKS, STEPS = 3, 128  # most
WALK_SECONDS = 0.02  # of CPU time, of all of them
PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
STACK = 4 << 20  # half of what a thread of the model's process has


class GrammarCost(msgspec.Struct, tag="tried", frozen=True, array_like=True):
    """`size`: bytes by which the process grew; `seconds` of the compilation."""

    size: int
    seconds: float


def confine_trial(compiled_bytes: int, seconds: float) -> None:
    """Limit the CPU time of this trial process to `seconds`, after which SIGPROF ends it, its memory and its stack."""
    _, hard = resource.getrlimit(resource.RLIMIT_STACK)
    resource.setrlimit(resource.RLIMIT_STACK, (STACK, hard))
    addresses = 2 * compiled_bytes  # of which the allocator uses some
    confine(addresses=addresses, cpu_seconds=seconds)


def run_trial(compiler: GrammarCompiler, kind: str, value: Any) -> GrammarCost:
    """Compile a constraint and measure its cost; raises `InputError` if it can't be enforced or takes too much."""
    limits = compiler.limits
    before, began = _resident_pages(), time.monotonic()
    matcher = compiler.compile(kind, value)
    seconds = time.monotonic() - began
    _walk(matcher, named(kind, value), limits.mask_seconds)
    size = max(_resident_pages() - before, 0) * PAGE
    if size > limits.compiled_bytes:
        raise GrammarError(
            f"this {named(kind, value)} takes {size >> 20} MiB of memory, {limits.compiled_bytes >> 20} are allowed",
            where=kind,
        )
    return GrammarCost(size, seconds)


def _walk(first: Any, kind: str, most_seconds: float) -> None:
    """Take random allowed tokens; raise `GrammarError` if masks take too long or the grammar is too complex."""
    chance, began = random.Random(0), time.process_time()
    for _ in range(WALKS):
        matcher = first.deep_copy()
        for _ in range(STEPS):
            started = time.process_time()
            mask = matcher.compute_bitmask()
            token = None if matcher.is_error() or matcher.is_stopped() else choose(mask, chance)
            if token is not None:
                matcher.try_consume_tokens([token])
            now = time.process_time()
            if matcher.is_error():
                why = brief(matcher.get_error())
                raise GrammarError(f"this {kind} becomes too complex after some tokens: {why}", where=kind)
            if now - started > most_seconds:
                raise GrammarError(f"this {kind} takes more than {most_seconds:g} s for a token", where=kind)
            if token is None:
                break
            if now - began > WALK_SECONDS:
                return


def choose(mask: bytes, chance: random.Random) -> int | None:
    """Return a token whose bit is set, or None for an empty mask."""
    start = chance.randrange(len(mask))
    rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")
    if not rest:
        return None
    place = len(mask) - len(rest)
    return 8 * place + chance.choice([bit for bit in range(8) if rest[0] >> bit & 1])


def _resident_pages() -> int:
    """Return the pages of resident memory; 0 where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return 0
