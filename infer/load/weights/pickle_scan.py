"""Static scan of a pickle for the globals it would call, without unpickling it."""

from __future__ import annotations

import pickletools
from collections.abc import Iterable
from typing import IO

import torch

from ...errors import SourceError
from .pickle_stand_ins import INERT_TYPES, in_python_3

MAX_PICKLE = 256 << 20
_STRINGS = {
    "SHORT_BINUNICODE",
    "BINUNICODE",
    "BINUNICODE8",
    "UNICODE",
    "STRING",
    "BINSTRING",
    "SHORT_BINSTRING",
}
_MEMO_PUT = {"PUT", "BINPUT", "LONG_BINPUT"}
_MEMO_GET = {"GET", "BINGET", "LONG_BINGET"}
_EXTENSIONS = {"EXT1", "EXT2", "EXT4"}


def globals_of(file: IO[bytes], where: str, pickles: int = 1) -> list[str]:
    """List every `module.name` that the next `pickles` pickles in `file` refer to, in order, each once.

    Reads opcodes only. A name computed on the pickle's stack, which `torch.save` never does, is "(computed)".
    """
    found: dict[str, None] = {}
    for _ in range(pickles):
        _scan(file, where, found)
    return list(found)


def _scan(file: IO[bytes], where: str, found: dict[str, None]) -> None:
    recent: list[str] = []
    memo: dict[int, str] = {}
    last: str | None = None
    try:
        for op, argument, _ in pickletools.genops(file):
            if op.name in ("GLOBAL", "INST"):
                found[str(argument).replace(" ", ".", 1)] = None
            elif op.name == "STACK_GLOBAL":
                found[".".join(recent[-2:]) if len(recent) > 1 else "(computed)"] = None
            elif op.name in _EXTENSIONS:
                found[f"(copyreg extension {argument})"] = None
            if op.name == "MEMOIZE" or op.name in _MEMO_PUT:
                memo[len(memo) if argument is None else int(argument)] = last or ""
                continue
            last = _text(op.name, argument, memo)
            if last is not None:
                recent = [*recent[-1:], last]
    except (ValueError, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise SourceError(
            f"the pickle can't be parsed: {error}",
            where=where,
            hint="The file is damaged: save or copy it again",
        ) from error


def _text(name: str, argument: object, memo: dict[int, str]) -> str | None:
    if name in _STRINGS and isinstance(argument, str):
        return argument
    if name in _MEMO_GET and isinstance(argument, int | str):
        return memo.get(int(argument))
    return None


def code_among(names: Iterable[str]) -> list[str]:
    """List the globals that torch's weights-only loader does not allow and that are no inert types."""
    from torch import _weights_only_unpickler

    allowed = {*_weights_only_unpickler._get_allowed_globals(), *INERT_TYPES}
    allowed |= {f"{item.__module__}.{item.__qualname__}" for item in _user_allowed()}
    return [name for name in names if in_python_3(name) not in allowed]


def _user_allowed() -> list[type]:
    return [item for item in torch.serialization.get_safe_globals() if isinstance(item, type)]
