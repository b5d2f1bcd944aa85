"""Names under which a server that asks for no key may be called: else a page of another site could ask it anything.

A browser lets a page speak to the site it came from; whoever owns that site's name can have it resolve to 127.0.0.1
afterwards (DNS rebinding). The request then still says the site's name as its Host.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...errors import UsageError

NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|[0-9a-f:.]{2,45}")
OWN = re.compile(r"(.+\.)?localhost|127\.\d{1,3}\.\d{1,3}\.\d{1,3}|::1")
HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::\d*)?")


class AllowedHosts:
    """This machine's own names for itself, and `names`."""

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = {_plain(name) for name in names}
        for name in self._names:
            if not NAME.fullmatch(name):
                raise UsageError(
                    f"a host is a name or an address without a port, got {name[:64]!r}", where="--allow-host"
                )

    def admit(self, value: bytes) -> bool:
        """Whether a Host header is one of them, with any port."""
        found = HOST.fullmatch(value.decode("latin-1").strip())
        if found is None:
            return False
        name = _plain(found[1] if found[1] is not None else found[2])
        return OWN.fullmatch(name) is not None or name in self._names


def _plain(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def allowed_hosts(names: Iterable[str], *, loopback: bool, keys: bool, bound: str) -> AllowedHosts | None:
    """What a server is to take: anything where a key is needed or other machines are meant, unless `names` are said."""
    given = list(names)
    if "*" in given or (not given and (keys or not loopback)):
        return None
    return AllowedHosts(given if loopback else [*given, bound])
