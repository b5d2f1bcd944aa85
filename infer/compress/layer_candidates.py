"""The layers of a float model and the formats that each could have: put in place, and taken out again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from ..plan import Plan
from . import Stats
from .layer_formats import FLOAT, Format, format_of, names_of, pinned, quantizable
from .pack_model import Packing, Shelf, origin_of, pack, packed_layers, refuses
from .sites import Weight


class Candidates:
    """Formats that could take the weights of `model`, whose weights are in memory and stay as they are."""

    def __init__(
        self, model: nn.Module, plan: Plan, formats: Sequence[str], stats: Mapping[str, Stats], shelf: Shelf
    ) -> None:
        self._formats = {name: format_of(name, plan) for name in formats if name != FLOAT}
        self._plan, self._stats, self._shelf = plan, stats, shelf
        self.all = quantizable(model)
        self.weights = [weight for weight in self.all if not weight.reasons and self.accepted(weight)]

    @property
    def names(self) -> list[str]:
        """Every name of every layer."""
        return names_of(self.all)

    def accepted(self, weight: Weight) -> list[str]:
        """The formats that all layers of a weight accept, in the order they were given."""
        return [name for name in self._formats if self.refusal(weight, name) is None]

    def refusal(self, weight: Weight, name: str) -> str | None:
        """Why a weight can't have a format."""
        if weight.reasons:
            return next(iter(weight.reasons.values()))
        reasons = (refuses(site, self._format(name), self._stats) for site in weight.sites)
        return next((reason for reason in reasons if reason), None)

    def _format(self, name: str) -> Format:
        if name not in self._formats:
            self._formats[name] = format_of(name, self._plan)
        return self._formats[name]

    def packing(self, weight: Weight, name: str) -> Packing:
        """The packed tensors of a weight, from the shelf when it was packed before."""
        format = self._format(name)
        return self._shelf.get(weight, format, lambda: pack(origin_of(weight), weight, format, self._stats))

    def assigned(self, formats: Mapping[str, str]) -> dict[str, str]:
        """First layer name of each weight → its format in an assignment by layer names; the unnamed are absent."""
        found = {weight.name: pinned(weight, formats) for weight in self.weights}
        return {name: format for name, format in found.items() if format is not None}

    @contextmanager
    def in_place(self, formats: Mapping[str, str]) -> Iterator[list[nn.Module]]:
        """The model with some weights packed, by first layer name; yields the float layers that were replaced."""
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
        """One layer of a weight, packed, on its own; the model stays as it is."""
        new = packed_layers(weight, self._format(name), self.packing(weight, name))
        yield new[[site.layer for site in weight.sites].index(layer)]
