"""What `infer serve` is told about its clients: keys, certificates, limits."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    import ssl

    from ..serve.limits import ServeLimits


class Nonfinite(enum.StrEnum):
    string = "string"
    error = "error"


def keys(named: Sequence[str] | None, file: Path | None) -> list[str] | None:
    """Those of both; None without any."""
    from ..serve.keys import read_file

    return [*(named or []), *(read_file(file) if file else [])] or None


def tls(certfile: Path | None, keyfile: Path | None, password: str | None) -> ssl.SSLContext | None:
    if certfile is None:
        if keyfile is not None:
            raise UsageError("a key without its certificate", hint="Give --ssl-certfile too")
        return None
    from ..serve.tls import context

    return context(certfile, keyfile, password)


def limits(named: Sequence[str] | None, *, refuse_nonfinite: bool) -> ServeLimits:
    from ..serve.limits import read

    return read([*(named or []), *(["nonfinite_error=true"] if refuse_nonfinite else [])])
