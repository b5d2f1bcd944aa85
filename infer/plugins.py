"""Plug-in discovery: a file is a plug-in, named by its file name; the module satisfies the folder's contract.

Six folders share this shape (`backends`, `infer.compress.formats`, `infer.attention`, `infer.serve.api`,
`infer.families`, `infer.llm.text.forms`); third parties add names through entry points of the groups `infer.backends`,
`infer.formats`, `infer.attention`, `infer.api`, `infer.families` and `infer.forms`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec

from .errors import InferError, UsageError, unknown

KINDS = {
    "backends": "backend",
    "infer.compress.formats": "quantizer",
    "infer.attention": "attention kernel",
    "infer.serve.api": "dialect",
    "infer.families": "family of models",
    "infer.llm.text.forms": "form of output",
}


class BackendOption(msgspec.Struct, frozen=True):
    """An option that a backend declares in `OPTIONS`: what it does (one phrase), its values, the default first.

    `searched_for`: objectives of a search that tries the other values on its best trial.
    """

    help: str
    values: tuple[str, ...]
    searched_for: tuple[str, ...] = ()


def names(folder: str) -> list[str]:
    """List the plug-ins of a folder, built-in ones first; files whose name starts with `_` are not plug-ins."""
    built_in = sorted(
        m.name for m in pkgutil.iter_modules(_package(folder).__path__) if not m.name.startswith("_")
    )
    return built_in + [name for name in sorted(_foreign(folder)) if name not in built_in]


def get(folder: str, name: str) -> Any:
    """Import a plug-in module; of `name:option` return what its `variant(option)` gives.

    Raises `UsageError` with the nearest name when there is none, and for an option that the plug-in does not have.
    """
    base, _, option = name.partition(":")
    if base not in names(folder):
        if folder == "backends":
            from . import refused_backends

            if (refusal := refused_backends.refusal(base)) is not None:
                raise refusal
        raise unknown(KINDS[folder], name, names(folder))
    foreign = _foreign(folder).get(base)
    module = foreign.load() if foreign else importlib.import_module(f"{folder}.{base}")
    if base == name:
        return module
    if not hasattr(module, "variant"):
        raise UsageError(f"{KINDS[folder]} {base} has no options, got {name!r}")
    return module.variant(option)


def why_not(folder: str, name: str) -> str | None:
    """Return the reason why a plug-in can't be used on this machine, or None."""
    return get(folder, name).missing()


def ahead_of_time(backend: Any) -> str:
    """Return how a backend compares forms that this machine can't run and that are made for another one; else ""."""
    return str(getattr(backend, "AHEAD_OF_TIME", ""))


def compiles(name: str) -> bool:
    """Return whether lowering by a backend takes most of a run: `COMPILES`."""
    return bool(getattr(get("backends", name), "COMPILES", False))


def declared_options(backend: Any) -> Mapping[str, BackendOption]:
    """Return the options that a backend declares."""
    options: Mapping[str, BackendOption] = getattr(backend, "OPTIONS", {})
    return options


def check_options(name: str, backend: Any, chosen: Mapping[str, str]) -> None:
    """Raise `UsageError` for an option or a value that the backend `name` does not declare."""
    options = declared_options(backend)
    if chosen and not options:
        raise UsageError(f"backend {name} has no options", where="--backend-option")
    for option, value in chosen.items():
        if option not in options:
            raise unknown(f"option of backend {name}", option, options)
        if value not in options[option].values:
            raise unknown(f"value of {option}", value, options[option].values)


@cache  # a search through every installed package
def _foreign(folder: str) -> dict[str, EntryPoint]:
    group = f"infer.{folder.rpartition('.')[2]}"
    return {point.name: point for point in entry_points(group=group)}


@cache
def _package(folder: str) -> ModuleType:
    package = importlib.import_module(folder)
    here = Path(__file__).resolve().parent
    there = Path(str(package.__path__[0])).resolve()
    if here != there and here not in there.parents and here.parent != there.parent:
        raise InferError(
            f"a folder named {folder!r} at {there} hides the one of infer",
            hint="Rename it, or start Python from another folder",
        )
    return package
