"""API keys of clients, compared in constant time as digests, so that not even their lengths leak."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from ...errors import UsageError
from ...regular_files import open_regular

MAX_FILE = 1 << 16
MAX_KEYS = 256


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
