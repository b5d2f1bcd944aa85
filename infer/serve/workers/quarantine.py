"""Digests of requests that killed a worker twice; they are refused from then on."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...errors import PoisonError

MOST = 1024  # requests remembered


class Quarantine:
    """Bounded set of content digests, the oldest evicted first; thread-safe."""

    def __init__(self, most: int = MOST) -> None:
        self._most, self._lock = most, threading.Lock()
        self._digests: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._digests)

    def __contains__(self, digest: bytes) -> bool:
        with self._lock:
            return digest in self._digests

    def add(self, digest: bytes) -> None:
        with self._lock:
            self._digests[digest] = None
            self._digests.move_to_end(digest)
            while len(self._digests) > self._most:
                self._digests.popitem(last=False)

    def refuse(self, digest: bytes) -> None:
        """Raise `PoisonError` for a quarantined digest; callers skip hashing while this is empty."""
        if digest in self:
            raise PoisonError("this request was being run when the model's process died, twice")


def digest_of(arrays: Mapping[str, Any]) -> bytes:
    """Return a digest of the names, dtypes, shapes and bytes of the arrays."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(array.reshape(-1).data)
    return digest.digest()
