"""Host header check of a server without API keys, against DNS rebinding.

A browser lets a page call the site that it came from. An attacker's site can change its name to resolve to 127.0.0.1
afterwards; the page's requests then reach this server, with the attacker's name in their Host header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import UsageError

NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|[0-9a-f:.]{2,45}")
OWN = re.compile(r"(.+\.)?localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|::1")
HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?")


class AllowedHosts:
    """Accepted Host names: loopback names and `names`. Raises `UsageError` for one that is no host name."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {_plain(name) for name in names}
        for name in self._names:
            if not NAME.fullmatch(name):
                raise UsageError(
                    f"expected a host name or address without a port, got {name[:64]!r}", where="--allow-host"
                )

    def admit(self, value: bytes) -> bool:
        """Return True if a Host header has an accepted name, with any port."""
        match = HOST.fullmatch(value.decode("latin-1").strip())
        if match is None:
            return False
        name = _plain(match[1] if match[1] is not None else match[2])
        return OWN.fullmatch(name) is not None or name in self._names


def _plain(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def allowed_hosts(names: Iterable[str], *, loopback: bool, keys: bool, bound: str) -> AllowedHosts | None:
    """Return the accepted hosts; None for any: with API keys, or on a non-loopback address without `names`."""
    given = list(names)
    if "*" in given or (not given and (keys or not loopback)):
        return None
    return AllowedHosts(given if loopback else [*given, bound])
