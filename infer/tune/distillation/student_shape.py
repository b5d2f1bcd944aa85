"""Size of a student beside its teacher, as it is written in `--student`."""

from __future__ import annotations

from dataclasses import dataclass

from ...errors import UsageError

MULTIPLE = 64  # of the kept neurons: group of a quantized weight
FORMS = "half, layers:N, width:SHARE, or both as layers:N,width:SHARE"


@dataclass(frozen=True)
class StudentShape:
    """Size of a student beside its teacher: `layers` as a number or a share, `width` as a share of the neurons."""

    layers: int | float = 1.0
    width: float = 1.0

    def num_layers(self, teacher: int) -> int:
        """Return the student's layers of a teacher with so many; raise `UsageError` for more than it has."""
        count = self.layers if isinstance(self.layers, int) else max(1, round(self.layers * teacher))
        if count > teacher:
            raise UsageError(f"the teacher has {teacher} layers, not {count}", where="--student")
        return count

    def num_neurons(self, teacher: int) -> int:
        """Return the student's neurons, a multiple of 64 where that leaves one."""
        wanted = max(1, round(self.width * teacher))
        return min(teacher, max(MULTIPLE, wanted // MULTIPLE * MULTIPLE)) if wanted < teacher else teacher


def parse_shape(text: str) -> StudentShape | None:
    """Parse `half`, `layers:N`, `width:SHARE` or both; None for anything else, which names a folder or a module.

    Raises `UsageError` for a number out of range.
    """
    if text == "half":
        return StudentShape(layers=0.5)
    parts = dict(part.partition(":")[::2] for part in text.split(","))
    if not set(parts) <= {"layers", "width"} or not all(parts.values()):
        return None
    try:
        shape = StudentShape(int(parts.get("layers", 0)) or 1.0, float(parts.get("width", 1.0)))
    except ValueError:
        raise UsageError(f"expected {FORMS}, got {text!r}", where="--student") from None
    if not 0 < shape.width <= 1 or shape.layers < 1:
        raise UsageError(f"expected at least one layer and a share up to 1, got {text!r}", where="--student")
    return shape
