"""Speeds of GGUF block types beside llama.cpp on the same file, from the results of `bench.llm.suite`."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from bench.shared.bars import Bar
from bench.shared.repository import RESULTS

COLUMN = "beside llama.cpp"
WORK = re.compile(r"same (?P<file>\w+) file, (?P<kind>decode|prefill) (?P<shape>\w+) \d+")
KINDS = ("decode", "prefill")


class _Results(msgspec.Struct):
    date: str
    machine: dict[str, Any]
    bars: list[Bar]


def speeds() -> dict[str, str]:
    """Return a phrase for each measured block type, by its name; the newest measurement of each work counts."""
    newest: dict[str, dict[tuple[str, str], tuple[str, float]]] = {}
    for path in [*RESULTS.glob("lm-*.json"), *RESULTS.glob("same-gguf-file-*.json")]:
        results = msgspec.json.decode(path.read_bytes(), type=_Results)
        about = f"{results.date}, {results.machine['cpu']}"
        for bar in results.bars:
            named = WORK.fullmatch(bar.work)
            if named is not None and bar.got is not None and bar.rival.startswith("llama.cpp"):
                works = newest.setdefault(block_type(named["file"]), {})
                key = named["shape"], named["kind"]
                if about >= works.get(key, ("", 0.0))[0]:
                    works[key] = about, bar.got
    return {name: phrase(works) for name, works in newest.items()}


def phrase(works: dict[tuple[str, str], tuple[str, float]]) -> str:
    """Return one phrase on the works of a block type, keyed by shape and kind: date with machine, and factor."""
    parts = []
    for shape in sorted({shape for shape, _ in works}):
        measured = {kind: works[shape, kind] for kind in KINDS if (shape, kind) in works}
        factors = ", ".join(f"{kind} {factor:.2f} ×" for kind, (_, factor) in measured.items())
        when = "; ".join(sorted({about for about, _ in measured.values()}))
        parts.append(f"{shape}: {factors} ({when})")
    return "; ".join(parts)


def block_type(file: str) -> str:
    """Return the block type that most weights of a kind of file have, `Q4_K` for `q4_K_M`, `IQ3_S` for `iq3_s`."""
    return re.sub(r"(?<=_K)_[SML]$", "", file).upper()
