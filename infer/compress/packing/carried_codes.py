"""Codes of a quantized source that the format `keep` carries over, and their findings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.expert_layers import ExpertLinear
from ...spec import Finding
from ...weights import Checkpoint, StoredCodes
from ..layer_overrides import Format
from ..quantizable_layers import NamedLayer
from .row_source import stored_name

STAGE = "compress"


@dataclass
class SquaredError:
    """Squared norms of the error of packed weights and of the weights themselves."""

    of_error: float = 0.0
    of_weight: float = 0.0

    def add(self, error: Tensor, weight: Tensor) -> None:
        """Add the error of some rows, and these rows."""
        self.of_error += _squares(error)
        self.of_weight += _squares(weight)

    def __iadd__(self, other: SquaredError) -> SquaredError:
        self.of_error += other.of_error
        self.of_weight += other.of_weight
        return self

    @property
    def relative(self) -> float:
        """Relative RMS error."""
        return (self.of_error / self.of_weight) ** 0.5 if self.of_weight else 0.0


def _squares(values: Tensor) -> float:
    """Sum squares row by row in float32, then in float64: four times faster than float64 throughout."""
    rows = torch.linalg.vector_norm(values.reshape(len(values), -1), dim=1)
    return float(rows.double().square().sum())


@dataclass(frozen=True)
class SourceCodes:
    """Result for one weight of a quantized source: carried over, or converted for the reason in `refused`.

    `error` is the difference from the weights that the source's own reader decodes.
    """

    layer: str
    kind: str
    refused: str
    error: SquaredError


def carries(format: Format) -> bool:
    """Return true for a format that carries codes of the source over."""
    return bool(getattr(format.quantizer, "CARRIES", False))


def carried(codes: StoredCodes, start: int, stop: int) -> dict[str, Tensor]:
    """Return the tensors of rows `start:stop`, with the order of the columns where they are sorted by group."""
    tensors = codes.rows(start, stop)
    return tensors if codes.order is None else {**tensors, "order": codes.order}


def stored_in_float(
    site: NamedLayer, checkpoint: Checkpoint | None, renames: Mapping[str, str] | None
) -> str | None:
    """Return the reason why a layer stays float: its source is not quantized there."""
    if checkpoint is None:
        return None
    own = [f"{name}.weight" for name in site.names]
    own += site.names if isinstance(site.layer, ExpertLinear) else []
    name = stored_name(own, checkpoint, renames)
    if name is None or checkpoint[name].codes() is not None:
        return None
    return f"the source stores it in {str(checkpoint[name].dtype).removeprefix('torch.')}"


def source_findings(sources: Iterable[SourceCodes]) -> list[Finding]:
    """List, for each form of the source, how many weights were carried over and how many converted, and why."""
    groups: dict[tuple[str, str], list[SourceCodes]] = defaultdict(list)
    for one in sources:
        groups[one.kind, one.refused].append(one)
    found = []
    for (kind, refused), members in groups.items():
        total = SquaredError()
        for one in members:
            total += one.error
        error = total.relative
        if refused:
            what = f"{kind} converted"
            why = f"to int8:weight, relative error {error:.2g}: {refused} ({members[0].layer})"
        else:
            what = f"{kind} carried over"
            why = "exactly" if error == 0 else f"relative difference {error:.2g}, of rounding"
        found.append(Finding(STAGE, what, len(members), "weights", why))
    return found
