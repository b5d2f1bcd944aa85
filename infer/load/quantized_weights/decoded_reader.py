"""Reader of a quantized checkpoint: each packed weight under its float name, other tensors as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...errors import SourceError
from ...spec import Finding
from ..weights import MappableReader, StoredCodes, WeightReader, num_bytes
from ..weights.file_blocks import FileExtent
from . import bitsandbytes, compressed_tensors, fp8_mxfp4, gptq_awq
from .packed_weight import IndexedReader, PackedWeight, Settings

HINT = "Give the original float checkpoint"
Find = Callable[[IndexedReader, Settings], dict[str, PackedWeight]]
METHODS: dict[str, Find] = {
    "gptq": gptq_awq.find_gptq,
    "awq": gptq_awq.find_awq,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fp8": fp8_mxfp4.find_fp8,
    "fbgemm_fp8": fp8_mxfp4.find_fp8,
    "mxfp4": fp8_mxfp4.find_mxfp4,
}


class DecodedReader:
    """Tensors of `reader` without the parts of packed weights, and those weights decoded."""

    def __init__(self, reader: WeightReader, packed: Mapping[str, PackedWeight], method: str = "") -> None:
        self._reader, self._packed, self._method = reader, dict(packed), method
        parts = {part for weight in packed.values() for part in weight.parts}
        self._names = [*(name for name in reader.names() if name not in parts), *packed]

    def names(self) -> list[str]:
        return list(self._names)

    def dtype(self, name: str) -> torch.dtype:
        return self._packed[name].dtype if name in self._packed else self._reader.dtype(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._packed[name].shape if name in self._packed else self._reader.shape(name)

    def read(self, name: str) -> Tensor:
        if name not in self._packed:
            return self._reader.read(name)
        return self.rows(name, 0, self._packed[name].shape[0])

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        if name not in self._packed:
            return self._reader.rows(name, start, stop)
        weight = self._packed[name]
        stop = min(stop, weight.shape[0])
        if stop <= start:
            return torch.empty((0, *weight.shape[1:]), dtype=weight.dtype)
        return weight.rows(start, stop)

    def extent(self, name: str) -> FileExtent | None:
        """Return the file extent of a tensor stored as it is; None for a packed one."""
        if name in self._packed or not isinstance(self._reader, MappableReader):
            return None
        return self._reader.extent(name)

    def codes(self, name: str) -> StoredCodes | None:
        """Return the codes of a packed weight; None for a tensor stored as it is."""
        if name not in self._packed:
            return None
        codes = self._packed[name].codes
        if codes is None:
            return StoredCodes.without(self._method, f"codes of {self._method} have no packed form here")
        return codes()


def open_quantized(reader: WeightReader, config: Any, where: str) -> tuple[DecodedReader, Finding]:
    """Return a reader of the decoded weights of a checkpoint, and a finding.

    `config`: `quantization_config` of config.json. Raises `SourceError` for a method or a form that infer does not
    read, and for packed weights whose parts do not fit each other.
    """
    settings = config if isinstance(config, dict) else {}
    method = settings.get("quant_method", settings.get("quant_algo", "unknown"))
    find = METHODS.get(str(method))
    if find is None and method == "unknown" and {"group_size", "bits"} <= settings.keys():
        raise SourceError(
            f"the checkpoint is quantized by MLX to {settings['bits']} bits, which infer does not read",
            where=where,
            hint=HINT,
        )
    if find is None:
        known = ", ".join(METHODS)
        raise SourceError(
            f"the checkpoint is quantized by {repr(method)[:80]}, which infer does not read; known: {known}",
            where=where,
            hint=HINT,
        )
    try:
        packed = find(IndexedReader(reader), settings)
    except SourceError as error:
        raise SourceError(error.message, where=error.where or where, hint=error.hint or HINT) from error
    if not packed:
        raise SourceError(
            f"config.json names {method}, and no tensor of the checkpoint is packed so", where=where
        )
    parts = {part for weight in packed.values() for part in weight.parts}
    why = f"{len(packed)} weights of {method}; fidelity is measured against their decoded values"
    return DecodedReader(reader, packed, str(method)), Finding(
        "load", "quantized", num_bytes(reader, parts) / 1e6, "MB", why
    )
