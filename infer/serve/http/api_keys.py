"""API keys: who may ask. Compared in constant time, as digests, so that not even their lengths show."""

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
    """Any one of `keys` lets a request in."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(check_key(key)) for key in keys]
        self._secret = os.urandom(32)
        if not 0 < len(self._digests) <= MAX_KEYS:
            raise UsageError(f"expected 1 to {MAX_KEYS} API keys, got {len(self._digests)}")

    def __len__(self) -> int:
        return len(self._digests)

    def admit(self, headers: Mapping[bytes, bytes]) -> bool:
        """Whether `Authorization: Bearer KEY` or `X-Api-Key: KEY` is one of them; every key is looked at."""
        given = _given(headers)
        found = False
        for digest in self._digests:
            found |= hmac.compare_digest(digest, given)
        return found

    def tenant(self, headers: Mapping[bytes, bytes]) -> str:
        """A name for the key of a request that tells nothing of it and is another in another process."""
        return hmac.new(self._secret, _given(headers), hashlib.sha256).hexdigest()[:32]


def _given(headers: Mapping[bytes, bytes]) -> bytes:
    """The digest of the key that a request brings."""
    scheme, _, token = headers.get(b"authorization", b"").partition(b" ")
    return _digest(token.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b""))


def check_key(key: str) -> bytes:
    """The key, if a header can carry it; raises `UsageError`."""
    if not (key and len(key) <= 1024 and key.isascii() and key.isprintable() and " " not in key):
        raise UsageError("an API key is 1 to 1024 visible ASCII characters without spaces")
    return key.encode()


def read_key_file(path: str | os.PathLike[str]) -> list[str]:
    """One key a line; empty lines and those that begin with # say nothing. Raises `UsageError`.

    Nobody but its owner may read or write the file, which is looked at through one open handle.
    """
    name = Path(path)
    try:
        with open_regular(name, error=UsageError) as file:
            told = os.fstat(file.fileno())
            text = file.read(MAX_FILE + 1)
    except UsageError as error:
        raise UsageError(f"can't read the key file: {error.message}", where=str(name)) from error
    if os.name == "posix" and told.st_mode & 0o077:
        raise UsageError(
            f"others may read or write the key file (mode {told.st_mode & 0o777:04o})",
            where=str(name),
            hint=f"chmod 600 {name}",
        )
    try:
        lines = [line.strip() for line in text.decode("ascii").splitlines()] if len(text) <= MAX_FILE else []
    except UnicodeDecodeError as error:
        raise UsageError("the key file is not plain ASCII text", where=str(name)) from error
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise UsageError("the key file holds no key, or too much", where=str(name))
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
