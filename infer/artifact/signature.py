"""Signature of a manifest: the HMAC-SHA256 by a key that only this user on this machine has."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

from .. import paths
from ..errors import ArtifactError
from .manifest import MANIFEST, MAX_BYTES, read_bounded

SIGNATURE = "manifest.sig"
_MAX_SIGNATURE = 1 << 12  # bytes


def sign(text: bytes) -> str:
    """Compute the signature of a manifest's text by this user's key, in hexadecimal digits."""
    return hmac.new(paths.signing_key(), text, hashlib.sha256).hexdigest()


def signed_here(folder: Path) -> bool:
    """Return true if this user's key signed the manifest as it is."""
    try:
        signature = read_bounded(folder / SIGNATURE, _MAX_SIGNATURE).strip()
        return hmac.compare_digest(signature, sign(read_bounded(folder / MANIFEST, MAX_BYTES)).encode())
    except ArtifactError:
        return False
