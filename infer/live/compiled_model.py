"""Callable in the place of a module: it takes and returns what the module did, by artifacts that were checked."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UsageError
from ..predict.predictor import Predictor
from ..report.document import Report
from .call_structure import CallReader, Structure, UnsupportedValueError
from .live_source import HALF
from .shown_report import ShownReport


def numbered(output: Path, index: int) -> Path:
    """Return the place of a variant's artifact: `model.infer`, then `model-2.infer`."""
    return output if index == 0 else output.with_name(f"{output.stem}-{index + 1}{output.suffix}")


@dataclass
class Variant:
    """One structure of calls, the artifact that computes it, and what the module returns for it."""

    structure: Structure
    returned: Structure
    output_dtypes: tuple[torch.dtype, ...]
    predictor: Predictor
    report: Report

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the module returns, on the device of its first tensor; None where the artifact takes no such
        tensors.
        """
        named = {
            name: tensor.float() if tensor.dtype in HALF else tensor
            for name, tensor in zip(self.structure.names, tensors, strict=True)
        }
        outputs = self.predictor.run_fitting(named)
        if outputs is None:
            return None
        device, on_cpu = tensors[0].device, tensors[0].is_cpu
        values = [
            value if value.dtype is dtype and on_cpu else value.to(device, dtype)
            for value, dtype in zip(outputs.values(), self.output_dtypes, strict=True)
        ]
        return self.returned.filled(values)


class CompiledModel(nn.Module):
    """A verified, faster form of a module, called as the module is.

    - `original`: the module; all its other attributes are this one's too, so that a program finds its `config`.
    - `misses`: how often the original ran instead, by reason: arguments of another structure, other sizes, gradients.
    - `report`: sizes, speed and fidelity as measured; a notebook shows it.

    It holds the weights as they were when it was made. In training mode, and where gradients of an input are asked for,
    the original runs.
    """

    misses: Counter[str]
    original: nn.Module

    def __init__(self, original: nn.Module, evaluated: nn.Module, variants: Sequence[Variant]) -> None:
        super().__init__()
        self.original = original
        self.training = False
        self.misses = Counter()
        self._reader = CallReader(original)
        self._by_key: dict[Hashable, Variant] = {variant.structure.key: variant for variant in variants}
        self._plain: dict[Hashable, Variant] = {}  # of calls whose arguments are all tensors
        object.__setattr__(self, "_evaluated", evaluated)  # of which nothing is a part of this module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the original does."""
        if self.training:
            return self._miss("training mode", args, kwargs)
        tensors, variant = self._variant_of(args, kwargs)
        if variant is None:
            return self._miss("other arguments", args, kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return self._miss("gradients", args, kwargs)
        result = variant.run(tensors)
        return self._miss("other sizes or dtypes", args, kwargs) if result is None else result

    def _variant_of(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[Sequence[Tensor], Variant | None]:
        """Return the tensors of a call and what computes it; the structure of calls with tensors only is remembered."""
        values = (*args, *kwargs.values())
        plain = all(type(value) is Tensor for value in values)
        key = (len(args), *kwargs) if plain else None
        if key is not None and key in self._plain:
            return values, self._plain[key]
        try:
            structure, tensors = self._reader.read(args, kwargs)
        except (TypeError, UnsupportedValueError):
            return (), None
        variant = self._by_key.get(structure.key)
        in_order = len(values) == len(tensors) and all(a is b for a, b in zip(values, tensors, strict=True))
        if key is not None and variant is not None and in_order:
            self._plain[key] = variant
        return tensors, variant

    def _miss(self, reason: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.misses[reason] += 1
        called = self.original if self.training else self._evaluated
        return called(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("original"), name)

    @property
    def report(self) -> ShownReport:
        """Measured sizes, speed and fidelity of each variant."""
        return ShownReport(tuple((variant.predictor.path, variant.report) for variant in self.variants))

    @property
    def variants(self) -> list[Variant]:
        """The structures of calls that are computed by an artifact."""
        return list(self._by_key.values())

    def save(self, path: str | Path) -> list[Path]:
        """Copy the artifact to `path`; of several variants each behind its number, `model-2.infer`.

        Raises `UsageError` where it exists.
        """
        target = Path(path)
        places = [numbered(target, index) for index in range(len(self._by_key))]
        if there := next((place for place in places if place.exists()), None):
            raise UsageError(f"{there} exists", hint="Choose another path")
        for place, variant in zip(places, self.variants, strict=True):
            shutil.copytree(variant.predictor.path, place, symlinks=True)
        return places

    def close(self) -> None:
        """Free the artifacts; the original stays."""
        for variant in self.variants:
            variant.predictor.close()
        self._by_key.clear()
        self._plain.clear()
