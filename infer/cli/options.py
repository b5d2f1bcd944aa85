"""Command-line options → `Plan`."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..errors import SourceError, UsageError, unknown
from ..plan import CALIBRATIONS, Plan
from ..regular_files import read_regular
from ..spec import ALIASES

DTYPES = ("auto", "float32", "float16", "bfloat16", "tf32")
MAX_PLAN = 1 << 27  # bytes
DEVICES = ("auto", "cpu", "cuda")


def to_plan(
    *,
    dtype: str,
    device: str,
    batches: str,
    max_batch: int,
    kv_dtype: str = "auto",
    adapters: str = "",
    calibrate: str = "auto",
    layers: Sequence[str] = (),
    max_drop: str | None = None,
    **rest: Any,
) -> Plan:
    """Spellings made canonical, bad combinations refused before anything is opened."""
    from ..attention import KV_DTYPES  # and torch, which a server of workers has no need of
    from ..generate import lora

    dtype = ALIASES.get(dtype, dtype)
    if dtype not in DTYPES:
        raise UsageError(f"no compute dtype named {dtype!r}", hint=f"Known: {', '.join(DTYPES)}")
    if device not in DEVICES:
        raise UsageError(f"no device named {device!r}", hint=f"Known: {', '.join(DEVICES)}")
    kv_dtype = ALIASES.get(kv_dtype, kv_dtype)
    if kv_dtype not in (known := ("auto", *KV_DTYPES)):
        raise UsageError(f"no dtype of the KV cache named {kv_dtype!r}", hint=f"Known: {', '.join(known)}")
    if calibrate not in CALIBRATIONS:
        raise unknown("--calibrate", calibrate, CALIBRATIONS)
    sizes = parse_batches(batches)
    drop = None if max_drop is None else parse_share(max_drop)
    pins = parse_layers(layers)
    if adapters:
        lora.parse(adapters)
    own: dict[str, Any] = {
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "adapters": adapters,
        "device": device,
        "batches": sizes,
        "max_batch": max_batch,
    }
    return Plan(**own, calibrate=calibrate, layers=pins, max_drop=drop, **rest)


def parse_share(text: str) -> float:
    """`0.5%` and `0.005` → 0.005."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        value = float(number) / (100 if percent else 1)
    except ValueError:
        value = -1.0
    if not 0 < value < 1:
        raise UsageError(f"expected a share like 0.5% or 0.005, got {text!r}", where="--max-drop")
    return value


def parse_layers(texts: Sequence[str]) -> dict[str, str]:
    """`lm_head=int8`, `*.mlp.*=cluster:3` → by name; a later one replaces an earlier one."""
    pins: dict[str, str] = {}
    for text in texts:
        name, found, format = (part.strip() for part in text.rpartition("="))
        if not found or not name or not format:
            raise UsageError(
                f"expected NAME=FORMAT, got {text!r}", where="--layer", hint="Example: lm_head=int8"
            )
        pins.pop(name, None)
        pins[name] = format
    return pins


def parse_named(texts: Sequence[str], where: str) -> dict[str, str]:
    """`style=adapters/style` → folders by name, each named once."""
    found: dict[str, str] = {}
    for text in texts:
        name, _, folder = text.partition("=")
        if not name or not folder or name in found:
            raise UsageError(f"expected NAME=FOLDER, each name once, got {text!r}", where=where)
        found[name] = folder
    return found


def parse_batches(text: str) -> tuple[int, ...]:
    """`1,8` → (1, 8)."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"expected batch sizes like 1,8, got {text!r}")
    return tuple(dict.fromkeys(int(part) for part in parts))


def default_output(source: str) -> Path:
    """`model.pt` → `model.infer` in the current folder."""
    path = Path(source.partition(":")[0].rstrip("/"))
    stem = path.name if path.is_dir() else path.stem
    return Path(f"{stem or 'model'}.infer")


def read_plan(path: Path, source: str) -> Plan:
    """A plan from a manifest.json (its `plan`) or a TOML file; SOURCE on the command line wins over the stored one."""
    try:
        text = read_regular(path, MAX_PLAN)
        data = tomllib.loads(text.decode()) if path.suffix == ".toml" else msgspec.json.decode(text)
        return msgspec.convert({**data.get("plan", data), "source": source}, Plan)
    except SourceError as error:
        raise UsageError(f"the plan can't be read: {error.message}", where=str(path)) from error
    except (
        tomllib.TOMLDecodeError,
        msgspec.MsgspecError,
        UnicodeDecodeError,
        RecursionError,
        AttributeError,
        TypeError,
    ) as error:
        raise UsageError(f"the plan can't be read: {error}", where=str(path)) from error
