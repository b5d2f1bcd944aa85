"""Access control: API keys of clients, and the Host header check of a server without keys.

Keys are compared in constant time as digests, so that not even their lengths leak. The Host check is against DNS
rebinding: a browser lets a page call the site that it came from. An attacker's site can change its name to resolve to
127.0.0.1 afterwards; the page's requests then reach this server, with the attacker's name in their Host header.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import UsageError
from ...regular_files import open_regular

MAX_FILE = 1 << 16
MAX_KEYS = 256
NAME = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?|[0-9a-f:.]{2,45}")
HOST = re.compile(r"(?:\[([^]]*)\]|([^:]*))(?::(\d{0,5}))?")


class ApiKeys:
    """Set of accepted API keys. Raises `UsageError` for none, too many, or one that a header cannot carry."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(check_key(key)) for key in keys]
        self._secret = os.urandom(32)
        if not 0 < len(self._digests) <= MAX_KEYS:
            raise UsageError(f"expected 1 to {MAX_KEYS} API keys, got {len(self._digests)}")

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, headers: Mapping[bytes, bytes]) -> bool:
        """Return True if `Authorization: Bearer KEY` or `X-Api-Key: KEY` is accepted. Compares with every key."""
        given = _given(headers)
        accepted = False
        for digest in self._digests:
            accepted |= hmac.compare_digest(digest, given)
        return accepted

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """Return a name for the key of a request: a keyed digest that reveals nothing and differs between processes."""
        return hmac.new(self._secret, _given(headers), hashlib.sha256).hexdigest()[:32]


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the digest of the key in a request's headers."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return _digest(token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))


def check_key(key: str) -> bytes:
    """Return the key as bytes. Raises `UsageError` if a header cannot carry it."""
    if not (key and len(key) <= 1024 and key.isascii() and key.isprintable() and " " not in key):
        raise UsageError("expected an API key of 1 to 1024 visible ASCII characters without spaces")
    return key.encode()


def read_key_file(path: str | os.PathLike[str]) -> list[str]:
    """Read a key file: one key per line; empty lines and lines that begin with # are ignored. Raises `UsageError`.

    Only its owner may have access to the file; mode and content are read through one open handle.
    """
    name = Path(path)
    try:
        with open_regular(name, error=UsageError) as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_FILE + 1)
    except UsageError as error:
        raise UsageError(f"can't read the key file: {error.message}", where=str(name)) from error
    if os.name == "posix" and status.st_mode & 0o077:
        raise UsageError(
            f"expected a key file that only its owner can read or write, got mode {status.st_mode & 0o777:04o}",
            where=str(name),
            hint=f"chmod 600 {name}",
        )
    try:
        lines = [line.strip() for line in text.decode("ascii").splitlines()] if len(text) <= MAX_FILE else []
    except UnicodeDecodeError as error:
        raise UsageError("expected a key file in ASCII", where=str(name)) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError(
            f"expected a key file with at least one key and at most {MAX_FILE} bytes", where=str(name)
        )
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
        if match is None or int(match[3] or 0) > 65535:
            return False
        if match[1] is not None and ":" not in match[1]:  # brackets are for IPv6
            return False
        name = _plain(match[1] if match[1] is not None else match[2])
        return _is_loopback(name) or name in self._names


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        named = NAME.fullmatch(name) is not None
        return named and (name == "localhost" or name.endswith(".localhost"))


def _plain(name: str) -> str:
    return name.lower().strip("[]").removesuffix(".")


def allowed_hosts(names: Iterable[str], *, loopback: bool, keys: bool, bound: str) -> AllowedHosts | None:
    """Return the accepted hosts; None for any: with API keys, or on a non-loopback address without `names`."""
    given = list(names)
    if "*" in given or (not given and (keys or not loopback)):
        return None
    return AllowedHosts(given if loopback else [*given, bound])
