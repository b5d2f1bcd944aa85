"""Options of one backend, `--backend-option NAME=VALUE`: each backend file declares its own in `OPTIONS`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from .errors import UsageError, unknown

WHERE = "--backend-option"


class BackendOption(msgspec.Struct, frozen=True):
    """An option: what it does (one phrase), its values, the default first.

    `searched_for`: objectives of a search that tries the other values on its best trial.
    """

    help: str
    values: tuple[str, ...]
    searched_for: tuple[str, ...] = ()


def declared(backend: Any) -> Mapping[str, BackendOption]:
    """Return the options that a backend declares."""
    found: Mapping[str, BackendOption] = getattr(backend, "OPTIONS", {})
    return found


def check(name: str, backend: Any, chosen: Mapping[str, str]) -> None:
    """Raise `UsageError` for an option or a value that the backend `name` does not declare."""
    options = declared(backend)
    if chosen and not options:
        raise UsageError(f"backend {name} has no options", where=WHERE)
    for option, value in chosen.items():
        if option not in options:
            raise unknown(f"option of backend {name}", option, options)
        if value not in options[option].values:
            raise unknown(f"value of {option}", value, options[option].values)
