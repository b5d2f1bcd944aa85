"""Values of options: parsed, checked and made canonical before anything is opened."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence

from ..errors import UsageError, unknown
from ..spec import ALIASES, KV_DTYPES, parse_size

COMPUTE_DTYPES = ("auto", "float32", "float16", "bfloat16", "tf32")
DEVICE = re.compile(r"auto|cpu|cuda(:\d{1,4})?")
# auto: generate where the model can, else score whole windows; generate: refuse a model that can't; features: the
# hidden states of a folder of transformers, whatever its own task is.
HIDDEN_STATES = "features"
TASKS = ("auto", "generate", "score", HIDDEN_STATES)
# none: where a format needs it only; diagonal: columns weigh by their mean square; gptq: error feedback; guided: the
# same with rows weighed by the gradients of the model's outputs.
CALIBRATIONS = ("auto", "none", "diagonal", "gptq", "guided")
RANK, MAX_RANK, MAX_SLOTS = 16, 256, 64  # of LoRA adapters
OBJECTIVES = ("latency", "throughput", "memory", "size")
SPACE = ("backend", "quant", "bits", "dtype", "calibrate", "kv_dtype", "threads")
_TIME = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zµ]*)")
_SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "min": 60.0, "h": 3600.0}
_SEQUENCES = re.compile(r"([0-9]{1,6})x([0-9]{1,9})")


def parse_dtype(text: str) -> str:
    """Parse a compute dtype, `bf16` → `bfloat16`; raise `UsageError` for an unknown one."""
    if (name := ALIASES.get(text, text)) not in COMPUTE_DTYPES:
        raise UsageError(f"no compute dtype named {text!r}", hint=f"Known: {', '.join(COMPUTE_DTYPES)}")
    return name


def parse_kv_dtype(text: str) -> str:
    """Parse the dtype of a KV cache, `fp16` → `float16`; raise `UsageError` for an unknown one."""
    known = ("auto", *KV_DTYPES)
    if (name := ALIASES.get(text, text)) not in known:
        raise UsageError(f"no dtype of the KV cache named {text!r}", hint=f"Known: {', '.join(known)}")
    return name


def parse_device(text: str) -> str:
    """Check a device, `auto`, `cpu`, `cuda` or `cuda:N`; raise `UsageError` for anything else."""
    if not DEVICE.fullmatch(text):
        raise UsageError(f"no device named {text!r}", hint="Known: auto, cpu, cuda, cuda:N")
    return text


def one_of(kind: str, known: Sequence[str]) -> Callable[[str], str]:
    """Return a parser that takes the `known` names and raises `UsageError` for any other one of this kind."""

    def parse(text: str) -> str:
        if text not in known:
            raise unknown(kind, text, known)
        return text

    return parse


parse_calibration = one_of("--calibrate", CALIBRATIONS)


def parse_share(text: str | float, *, flag: str = "--max-drop", zero: bool = False) -> float:
    """Parse a share, `0.5%` or `0.005` → 0.005; raise `UsageError` unless it is above 0 (or 0 with `zero`), below 1."""
    written = str(text).strip()
    try:
        value = float(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1 or (value == 0 and not zero):
        raise UsageError(f"expected a share like 0.5% or 0.005, got {text!r}", where=flag)
    return value


def parse_layers(pins: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Parse `lm_head=int8`, `*.mlp.*=cluster:3` to formats by name; a later one replaces an earlier one."""
    if isinstance(pins, Mapping):
        return dict(pins)
    formats: dict[str, str] = {}
    for text in pins:
        name, format = _pair(text, "NAME=FORMAT", "--layer", "lm_head=int8", last=True)
        formats.pop(name, None)
        formats[name] = format
    return formats


def parse_backend_options(texts: Sequence[str] | Mapping[str, str]) -> dict[str, str]:
    """Parse `prepacking=off` to values by name; a later one replaces an earlier one."""
    if isinstance(texts, Mapping):
        return {str(name): str(value) for name, value in texts.items()}
    return dict(_pair(text, "NAME=VALUE", "--backend-option", "prepacking=off") for text in texts)


def _pair(text: str, form: str, flag: str, example: str, *, last: bool = False) -> tuple[str, str]:
    """Split a text at its first equals sign, or its `last`; raise `UsageError` unless both sides hold something."""
    name, _, value = (part.strip() for part in (text.rpartition("=") if last else text.partition("=")))
    if not name or not value:
        raise UsageError(f"expected {form}, got {text!r}", where=flag, hint=f"Example: {example}")
    return name, value


def parse_batches(sizes: str | Sequence[int]) -> tuple[int, ...]:
    """Parse batch sizes, `1,8` → (1, 8), each once; raise `UsageError` unless all are positive numbers."""
    parts = sizes.split(",") if isinstance(sizes, str) else [str(size) for size in sizes]
    if not all(part.strip().isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"expected batch sizes like 1,8, got {sizes!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def parse_adapters(text: str) -> tuple[int, int]:
    """Parse LoRA slots and rank, `4` → (4, 16), `4:32` → (4, 32); raise `UsageError` for any other form."""
    slots, _, rank = text.partition(":")
    if not slots.isdigit() or (rank and not rank.isdigit()) or text.endswith(":"):
        raise UsageError(f"expected SLOTS or SLOTS:RANK, got {text!r}", where="--adapters")
    sizes = int(slots), int(rank or RANK)
    if not (1 <= sizes[0] <= MAX_SLOTS and 1 <= sizes[1] <= MAX_RANK):
        raise UsageError(
            f"expected 1 to {MAX_SLOTS} slots of rank 1 to {MAX_RANK}, got {text}", where="--adapters"
        )
    return sizes


def check_adapters(text: str) -> str:
    """Return the text if it is empty or `parse_adapters` takes it; else raise `UsageError`."""
    if text:
        parse_adapters(text)
    return text


def recovery_budget(text: str) -> tuple[float | None, int | None]:
    """Parse a budget of recovery to (seconds, tokens), one of them None: `30min`, or a whole number of tokens."""
    if re.fullmatch(r"[0-9]{1,12}", text):
        if int(text) < 1:
            raise UsageError("expected at least 1 token, got 0", where="--recover")
        return None, int(text)
    return parse_seconds(text), None


def check_recovery(text: str) -> str:
    """Return the text if it is empty or `recovery_budget` takes it; else raise `UsageError`."""
    if text:
        recovery_budget(text)
    return text


def format_batches(sizes: Sequence[int]) -> str:
    """Format batch sizes as `parse_batches` takes them."""
    return ",".join(map(str, sizes))


def parse_texts(texts: str | Sequence[str]) -> tuple[str, ...]:
    """Make a tuple of one text or several."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def parse_paths(paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Make a tuple of texts of one path or several."""
    if isinstance(paths, str | os.PathLike):
        return (os.fspath(paths),)
    return tuple(os.fspath(path) for path in paths)


def parse_folders(folders: Mapping[str, str | os.PathLike[str]] | Sequence[str]) -> dict[str, str]:
    """Parse `style=adapters/style` to folders by name; raise `UsageError` for a name given twice."""
    if isinstance(folders, Mapping):
        return {name: os.fspath(folder) for name, folder in folders.items()}
    by_name: dict[str, str] = {}
    for text in folders:
        name, _, folder = text.partition("=")
        if not name or not folder or name in by_name:
            raise UsageError(f"expected NAME=FOLDER, each name once, got {text!r}", where="--lora")
        by_name[name] = folder
    return by_name


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
    size = parse_size(text, "")
    return int(size or 0)


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
        pairs = [(name, list(map(str, values))) for name, values in texts.items()]
    else:
        pairs = [_values_of(text) for text in texts]
    space: dict[str, tuple[str, ...]] = {}
    for name, values in pairs:
        backend, dot, option = name.partition(".")  # which `budget_search.space` checks
        name = name if dot and backend and option else name.replace("-", "_")
        if not dot and name not in SPACE:
            raise unknown("part of --space", name, SPACE)
        space[name] = tuple(dict.fromkeys((*space.get(name, ()), *values)))
        for value in space[name]:
            _check_number(name, value)
    return space


def _values_of(text: str) -> tuple[str, list[str]]:
    name, listed = _pair(text.rstrip(" ,"), "NAME=VALUES", "--space", "backend=ort,inductor")
    return name, [value.strip() for value in listed.split(",") if value.strip()]


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
