"""Candidate formats of the layers of a float model, packed, put in place and taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from ..plan import Plan
from .layer_overrides import FLOAT, Format, format_of, names_of, pinned, quantizable
from .packing.pack_model import pack, packed_layers, refuses
from .packing.packing_result import PackingCache, PackingResult
from .packing.row_source import row_source_of
from .quantizable_layers import Weight
from .quantizer import Stats


class Candidates:
    """Candidate formats of the weights of `model`, which are in memory and stay unchanged."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        formats: Sequence[str],
        stats: Mapping[str, Stats],
        packing_cache: PackingCache,
    ) -> None:
        self._formats = {name: format_of(name, plan) for name in formats if name != FLOAT}
        self._plan, self._stats, self._packing_cache = plan, stats, packing_cache
        self.all = quantizable(model)
        self.weights = [weight for weight in self.all if not weight.reasons and self.accepted(weight)]

    @property
    def names(self) -> list[str]:
        """All names of all layers."""
        return names_of(self.all)

    def accepted(self, weight: Weight) -> list[str]:
        """List the formats that all layers of a weight accept, in the given order."""
        return [name for name in self._formats if self.refusal(weight, name) is None]

    def refusal(self, weight: Weight, name: str) -> str | None:
        """Return the reason why a weight can't have a format, or None."""
        if weight.reasons:
            return next(iter(weight.reasons.values()))
        reasons = (refuses(site, self._format(name), self._stats) for site in weight.sites)
        return next((reason for reason in reasons if reason), None)

    def _format(self, name: str) -> Format:
        if name not in self._formats:
            self._formats[name] = format_of(name, self._plan)
        return self._formats[name]

    def packing(self, weight: Weight, name: str) -> PackingResult:
        """Return the packed tensors of a weight, cached when packed before."""
        format = self._format(name)
        return self._packing_cache.get(
            weight, format, lambda: pack(row_source_of(weight), weight, format, self._stats)
        )

    def assigned(self, formats: Mapping[str, str]) -> dict[str, str]:
        """Return the format of each weight by first layer name, from an assignment by layer names."""
        found = {weight.name: pinned(weight, formats) for weight in self.weights}
        return {name: format for name, format in found.items() if format is not None}

    @contextmanager
    def in_place(self, formats: Mapping[str, str]) -> Iterator[list[nn.Module]]:
        """Put packed weights into the model, by first layer name; yield the replaced float layers."""
        taken: list[nn.Module] = []
        swaps: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        for weight in self.weights:
            name = formats.get(weight.name, FLOAT)
            if name == FLOAT:
                continue
            new_layers = packed_layers(weight, self._format(name), self.packing(weight, name))
            for site, new in zip(weight.sites, new_layers, strict=True):
                taken.append(site.layer)
                swaps += [(parent, attribute, site.layer, new) for parent, attribute in site.parents]
        try:
            for parent, attribute, _, new in swaps:
                setattr(parent, attribute, new)
            yield taken
        finally:
            for parent, attribute, old, _ in swaps:
                setattr(parent, attribute, old)

    @contextmanager
    def single(self, weight: Weight, layer: nn.Module, name: str) -> Iterator[nn.Module]:
        """Return one layer of a weight, packed, on its own; the model stays unchanged."""
        new = packed_layers(weight, self._format(name), self.packing(weight, name))
        yield new[[site.layer for site in weight.sites].index(layer)]
