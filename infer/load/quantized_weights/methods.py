"""Quantized checkpoints decoded: each packed weight under its float name, other tensors as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ...errors import SourceError
from ...spec import Finding
from ...weights import Checkpoint, num_bytes
from . import bitsandbytes, compressed_tensors, fp8_mxfp4, gptq_awq
from .packed_weight import PackedWeight, Settings

HINT = "Give the original float checkpoint"
Find = Callable[[Checkpoint, Settings], dict[str, PackedWeight]]
METHODS: dict[str, Find] = {
    "gptq": gptq_awq.find_gptq,
    "awq": gptq_awq.find_awq,
    "bitsandbytes": bitsandbytes.find,
    "compressed-tensors": compressed_tensors.find,
    "fp8": fp8_mxfp4.find_fp8,
    "fbgemm_fp8": fp8_mxfp4.find_fp8,
    "mxfp4": fp8_mxfp4.find_mxfp4,
}


def open_quantized(checkpoint: Checkpoint, config: Any, where: str) -> tuple[Checkpoint, Finding]:
    """Return a checkpoint with its weights decoded, and a finding.

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
        packed = find(checkpoint, settings)
    except SourceError as error:
        raise SourceError(error.message, where=error.where or where, hint=error.hint or HINT) from error
    if not packed:
        raise SourceError(
            f"config.json names {method}, and no tensor of the checkpoint is packed so", where=where
        )
    parts = {part for held in packed.values() for part in held.parts}
    decoded = {name: weight for name, weight in checkpoint.items() if name not in parts}
    decoded |= {name: held.weight for name, held in packed.items()}
    why = f"{len(packed)} weights of {method}; fidelity is measured against their decoded values"
    return decoded, Finding("load", "quantized", num_bytes(checkpoint, parts) / 1e6, "MB", why)
