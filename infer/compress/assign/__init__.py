"""Mixed precision: assignment of formats to layers by their effect on output, size and time."""

from __future__ import annotations

from .assignment import Mix, Real
from .choose_formats import decide
from .fallback import rise
from .format_order import smallest

__all__ = ["Mix", "Real", "decide", "rise", "smallest"]
