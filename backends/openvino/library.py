"""The package `openvino`, imported without its telemetry."""

from __future__ import annotations

import importlib
import sys
from typing import Any

_TELEMETRY = "openvino_telemetry"


def library() -> Any:
    """Import `openvino` without its telemetry, which would fork and send an event over the network."""
    if "openvino" in sys.modules:
        return sys.modules["openvino"]
    telemetry, absent = sys.modules.get(_TELEMETRY), _TELEMETRY not in sys.modules
    sys.modules[_TELEMETRY] = None  # type: ignore[assignment]
    try:
        return importlib.import_module("openvino")
    finally:
        sys.modules.pop(_TELEMETRY)
        if not absent:
            sys.modules[_TELEMETRY] = telemetry  # type: ignore[assignment]
