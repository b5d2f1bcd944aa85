"""Mixed precision: which format each layer gets, by what it does to the output, to the size and to the time."""

from __future__ import annotations

from .decide import decide
from .ladder import smallest
from .mix import Mix, Real
from .rising import rise

__all__ = ["Mix", "Real", "decide", "rise", "smallest"]
