"""Report of the weights of a quantized source in an export: carried over, or converted with their error."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from ..spec import Finding
from .stored_rows import error_text


@dataclass
class SourceReport:
    """Weights carried over, and weights converted with their error, by their form and that of the file."""

    _carried: dict[tuple[str, str], list[float]] = field(default_factory=lambda: defaultdict(list))
    _converted: dict[tuple[str, str], list[tuple[float, str, str]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def carried(self, kind: str, type_: str, error: float) -> None:
        """Note a weight whose codes are in the file; `error`: relative difference of rounded scales."""
        self._carried[kind, type_].append(error)

    def converted(self, kind: str, type_: str, error: float, reason: str, name: str) -> None:
        """Note a weight that was decoded and quantized or rounded anew."""
        self._converted[kind, type_].append((error, reason, name))

    def findings(self) -> list[Finding]:
        """List each form of the source and of the file, with the largest error of its weights."""
        found = [
            Finding(
                "export", f"{kind} carried over to {type_}", len(errors), "weights", error_text(max(errors))
            )
            for (kind, type_), errors in self._carried.items()
        ]
        for (kind, type_), members in self._converted.items():
            error, reason, name = max(members)
            why = f"relative error up to {error:.2g} ({name}): {reason}" if error else f"exactly: {reason}"
            way = "converted" if error else "decoded"
            found.append(Finding("export", f"{kind} {way} to {type_}", len(members), "weights", why))
        return found
