"""Who sent a request, as far as fairness among clients goes."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .routing import Call


def client_of(call: Call) -> str:
    """The API key, as a digest, where the server has keys; else the address."""
    if call.service.keys is None:
        return call.client
    scheme, _, token = call.headers.get(b"authorization", b"").partition(b" ")
    given = token.strip() if scheme.lower() == b"bearer" else call.headers.get(b"x-api-key", b"")
    return hashlib.sha256(given).hexdigest()
