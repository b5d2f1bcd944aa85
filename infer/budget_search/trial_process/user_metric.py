"""The user's own measure of quality: a function of a Predictor, named FILE.py:FUNCTION."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import UsageError, unknown
from ...load.sources.user_module import import_file, user_code_errors
from ...predict.predictor import Predictor

WHERE = "--metric"


class UserMetric:
    """Imports the function once; `score` calls it with an opened artifact."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._function = load(text)

    def score(self, artifact: Path) -> float:
        """Return the function's value for an artifact.

        Raises `SourceError` for an exception of the function, `UsageError` for what is no number.
        """
        with Predictor.load(artifact) as predictor, user_code_errors(self._text):
            found = self._function(predictor)
        try:
            value = float(found)
        except (TypeError, ValueError):
            value = math.nan
        if math.isnan(value):
            raise UsageError(f"expected a number of {self._text}, got {found!r:.64}", where=WHERE)
        return value


def load(text: str) -> Callable[[Any], Any]:
    """Import the file and return its function; raise `UsageError` for a wrong name or a missing file."""
    file, _, name = text.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        raise UsageError(f"expected FILE.py:FUNCTION, got {text!r}", where=WHERE)
    module = import_file(Path(file))
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise unknown(f"function in {file}", name, known)
    return function  # type: ignore[no-any-return]
