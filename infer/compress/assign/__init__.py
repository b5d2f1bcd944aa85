"""Mixed precision: which format each layer gets, by what it does to the output, to the size and to the time."""

from __future__ import annotations

from .assignment import Mix, Real
from .choose_formats import decide
from .fallback import rise
from .format_order import smallest

__all__ = ["Mix", "Real", "decide", "rise", "smallest"]
