"""Values of the options of a search: times, sizes, shares and spaces, parsed with the unit that was meant."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

from ..errors import UsageError, unknown
from ..spec import parse_size

OBJECTIVES = ("latency", "throughput", "memory", "size")
SPACE = ("backend", "quant", "bits", "dtype", "calibrate", "kv_dtype", "threads")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zµ]*)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_SEQUENCES = re.compile(r"([0-9]{1,6})x([0-9]{1,9})")


def parse_seconds(text: str | float) -> float:
    """Parse a time with its unit, `5ms`, `1.5 s`, `10min`, `1h`, to seconds; a number is seconds already.

    Raises `UsageError` for a text without unit, since 5 could mean milliseconds.
    """
    if isinstance(text, int | float) and not isinstance(text, bool):
        return float(text)
    match = _TIME.fullmatch(str(text).strip().lower())
    if match is None or match[2] not in _SECONDS:
        known = ", ".join(unit for unit in _SECONDS if unit not in ("sec", "us"))
        raise UsageError(
            f"expected a time with its unit like 5ms or 10min, got {text!r}", hint=f"Units: {known}"
        )
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds < math.inf:
        raise UsageError(f"expected a time above 0, got {text!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """Format seconds as `parse_seconds` takes them, `5ms`."""
    for unit, factor in (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3)):
        if seconds >= factor and math.isclose(seconds / factor, round(seconds / factor, 6), rel_tol=1e-12):
            return f"{round(seconds / factor, 6):g}{unit}"
    return f"{seconds!r}s"


def parse_bytes(text: str | int) -> int:
    """Parse a size, `300MB` or `2GiB`, to bytes; raise `UsageError` for anything else."""
    found = parse_size(text, "")
    return int(found or 0)


def format_bytes(size: int) -> str:
    """Format bytes as `parse_bytes` takes them, exactly."""
    for unit, factor in (("GiB", 2**30), ("GB", 10**9), ("MiB", 2**20), ("MB", 10**6), ("KB", 10**3)):
        if size >= factor and size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


def parse_objective(text: str) -> str:
    """Check an objective, one of `OBJECTIVES`, or "" for none; raise `UsageError` for anything else."""
    if text and text not in OBJECTIVES:
        raise unknown("objective", text, OBJECTIVES)
    return text


def parse_sequences(text: str) -> tuple[int, int]:
    """Parse sequences and tokens of each, `8x2048` → (8, 2048); raise `UsageError` for any other form."""
    match = _SEQUENCES.fullmatch(text.strip())
    if match is None or not int(match[1]) or not int(match[2]):
        raise UsageError(
            f"expected COUNTxTOKENS, got {text!r}",
            where="--sequences",
            hint="Example: 8x2048, eight sequences of 2048 tokens",
        )
    return int(match[1]), int(match[2])


def check_sequences(text: str) -> str:
    """Return the text if it is empty or `parse_sequences` takes it; else raise `UsageError`."""
    if text:
        parse_sequences(text)
    return text


def parse_space(texts: Sequence[str] | Mapping[str, Sequence[str]]) -> dict[str, tuple[str, ...]]:
    """Parse `backend=ort,eager` to values by name, each once; raise `UsageError` for an unknown name and no values."""
    if isinstance(texts, Mapping):
        pairs = [(name, tuple(map(str, values))) for name, values in texts.items()]
    else:
        pairs = [_pair(text) for text in texts]
    found: dict[str, tuple[str, ...]] = {}
    for name, values in pairs:
        backend, dot, option = name.partition(".")  # which `budget_search.space` checks
        name = name if dot and backend and option else name.replace("-", "_")
        if not dot and name not in SPACE:
            raise unknown("part of --space", name, SPACE)
        found[name] = tuple(dict.fromkeys((*found.get(name, ()), *values)))
        for value in found[name]:
            _check_number(name, value)
    return found


def _pair(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, listed = (part.strip() for part in text.partition("="))
    values = tuple(value.strip() for value in listed.split(",") if value.strip())
    if not equals or not name or not values:
        raise UsageError(
            f"expected NAME=VALUES, got {text!r}", where="--space", hint="Example: backend=ort,inductor"
        )
    return name, values


def _check_number(name: str, value: str) -> None:
    if name == "threads" and not (value.isdigit() and int(value)):
        raise UsageError(f"expected a number of threads, got {value!r}", where="--space")
    if name == "bits":
        try:
            bits = float(value)
        except ValueError:
            bits = math.nan
        if not 1 <= bits <= 32:
            raise UsageError(f"expected bits per weight between 1 and 32, got {value!r}", where="--space")


def format_space(space: Mapping[str, Sequence[str]]) -> list[str]:
    """Format a space as `parse_space` takes it."""
    return [f"{name}={','.join(values)}" for name, values in space.items()]
