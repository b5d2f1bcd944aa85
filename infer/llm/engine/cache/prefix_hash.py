"""Hashes of the prefix cache: a page's key is that of its tokens and of all tokens before it.

The chain begins with what the pages depend on besides tokens: adapter, salt, and the source of an encoder-decoder.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ..requests import Request


def hash_page(parent: bytes, tokens: Sequence[int]) -> bytes:
    """Hash a full page: its tokens and, through `parent`, all tokens before it."""
    return hashlib.sha256(parent + np.array(tokens, dtype=np.int64).tobytes()).digest()


def hash_root(*marks: str) -> bytes:
    """Hash adapter and cache salt to the parent hash of a sequence's first page."""
    return hashlib.sha256("\0".join(f"{len(mark)}:{mark}" for mark in marks).encode()).digest()


def source_digest(request: Request) -> str:
    """Return a digest of the source of a request: what the decoder computes depends on it."""
    return hash_page(request.features or b"", request.prompt).hex()
