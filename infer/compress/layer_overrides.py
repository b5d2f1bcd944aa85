"""Format of each layer: formats pinned to layers override the model's format.

A format is a value of `--quant`, or "float". A layer is named exactly or by a glob; an exact name wins over
every glob and a later glob over an earlier one. Layers that share a weight share its format.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from ..errors import UsageError
from ..plan import Plan
from .quantizable_layers import NamedLayer, Weight, find
from .quantizer import Quantizer, get

FLOAT = "float"


@dataclass(frozen=True)
class Format:
    """Format name, its quantizer, and the plan with its option."""

    name: str
    quantizer: Quantizer
    plan: Plan


def format_of(name: str, plan: Plan) -> Format:
    """Resolve a format name; raise `UsageError` when unknown. "float" has no quantizer."""
    own = plan.with_(quant=name)
    return Format(name, get(own), own)


def check_pins(pins: Mapping[str, str], plan: Plan) -> None:
    """Raise `UsageError` unless every pinned format is known; the layers are not known yet."""
    for format in set(pins.values()) - {FLOAT}:
        get(plan.with_(quant=format))


def resolve_pins(pins: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Map layers to pinned formats; raise `UsageError` for a name or glob without a match."""
    known = list(names)
    found: dict[str, str] = {}
    for pattern, format in pins.items():
        matching = [pattern] if pattern in known else [n for n in known if fnmatchcase(n, pattern)]
        if not matching:
            near = difflib.get_close_matches(pattern, known, n=1)
            guess = f" Did you mean {near[0]!r}?" if near else ""
            few = ", ".join(known[:8]) + (", …" if len(known) > 8 else "")
            raise UsageError(f"no layer named {pattern!r}", where="--layer", hint=f"Known: {few}.{guess}")
        found |= dict.fromkeys(matching, format)
    return found | {name: format for name, format in pins.items() if name in known}


def quantizable(model: nn.Module) -> list[Weight]:
    """List the weights of layers with a quantized form, with `reasons` of those that no format may take."""
    return find(model, lambda site: None)


def names_of(weights: Iterable[Weight]) -> list[str]:
    """List every name of every layer, tied ones and aliases included."""
    return [name for weight in weights for site in weight.sites for name in site.names]


def layer_names(model: nn.Module) -> list[str]:
    """List every name of every layer of a model that has a quantized form."""
    return names_of(quantizable(model))


def pinned(weight: Weight, chosen: Mapping[str, str]) -> str | None:
    """Return the pinned format of a weight; raise `UsageError` when its layers have two."""
    named = {n: chosen[n] for site in weight.sites for n in site.names if n in chosen}
    if len(set(named.values())) > 1:
        (a, x), (b, y) = (
            list(named.items())[0],
            next(i for i in named.items() if i[1] != next(iter(named.values()))),
        )
        raise UsageError(
            f"{a!r} and {b!r} share one weight; it can't be {x} and {y}",
            where="--layer",
            hint="Give them the same format",
        )
    return next(iter(named.values()), None)


Refuses = Callable[[NamedLayer, Format], str | None]


def find_with_formats(
    model: nn.Module, plan: Plan, formats: Mapping[str, str], refuses: Refuses
) -> list[tuple[Weight, Format | None]]:
    """List every weight with its format; None and the reason where it stays float.

    `formats` holds complete layer names; who is not in it gets `plan.quant`.
    """
    known: dict[str, Format] = {}
    own: dict[int, Format | None] = {}
    for weight in quantizable(model):
        name = pinned(weight, formats) or plan.quant
        format = None if name == FLOAT else known.setdefault(name, format_of(name, plan))
        own |= {id(site.layer): format for site in weight.sites}

    def reason(site: NamedLayer) -> str | None:
        format = own[id(site.layer)]
        return "kept float" if format is None else refuses(site, format)

    found = find(model, reason)
    return [(weight, None if weight.reasons else own[id(weight.sites[0].layer)]) for weight in found]
