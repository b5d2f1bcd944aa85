"""bitsandbytes: 4-bit tables (nf4, fp4) in blocks of the flat weight, and int8 rows (LLM.int8).

4 bit: codes uint8 [weights / 2, 1], high half first; `absmax` of each block, itself quantized where double quantization
was on; the table; and the state as JSON in a uint8 tensor. 8 bit: int8 [out, in] and `SCB`, the largest value of a row.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from ...errors import SourceError
from ...weights import Checkpoint, StoredCodes, Weight
from .group_codes import byte_codes, table_codes
from .packed_weight import (
    PackedWeight,
    Settings,
    is_size,
    modules,
    nibbles,
    require_shape,
    shape_of,
)

_STATE = ".weight.quant_state.bitsandbytes__"
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_LARGEST_OFFSET = 1e30
_ROW_UNIT = 0.007874015718698502  # bitsandbytes' float32 of 1 / 127


def find(checkpoint: Checkpoint, settings: Settings) -> dict[str, PackedWeight]:
    """Return the packed weights of both forms."""
    found: dict[str, PackedWeight] = {}
    for kind in ("nf4", "fp4"):
        for name in modules(checkpoint, _STATE + kind):
            found[f"{name}.weight"] = _four_bit(checkpoint, name, kind)
    for name in modules(checkpoint, ".SCB"):
        found[f"{name}.weight"] = _eight_bit(checkpoint, name)
    return found


def _four_bit(checkpoint: Checkpoint, name: str, kind: str) -> PackedWeight:
    weight = f"{name}.weight"
    state = _state(checkpoint, f"{name}{_STATE}{kind}")
    outputs, inputs = state["shape"]
    block, dtype = state["blocksize"], _DTYPES[state["dtype"]]
    blocks = -(-outputs * inputs // block)
    require_shape(checkpoint, weight, (-(-outputs * inputs // 2), 1), torch.uint8)
    require_shape(checkpoint, f"{weight}.absmax", (blocks,))
    require_shape(checkpoint, f"{weight}.quant_map", (16,), torch.float32)
    parts = [weight, f"{weight}.absmax", f"{weight}.quant_map", f"{name}{_STATE}{kind}"]
    nested = "nested_blocksize" in state
    if nested:
        parts += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        require_shape(checkpoint, parts[-2], (-(-blocks // state["nested_blocksize"]),), torch.float32)
        require_shape(checkpoint, parts[-1], (256,), torch.float32)

    def scales() -> Tensor:
        stored = checkpoint[f"{weight}.absmax"].read()
        if not nested:
            return stored.float()
        largest = checkpoint[f"{weight}.nested_absmax"].read()[
            torch.arange(blocks) // state["nested_blocksize"]
        ]
        return checkpoint[f"{weight}.nested_quant_map"].read()[stored.int()] * largest + float(
            state["nested_offset"]
        )

    def rows(start: int, stop: int) -> Tensor:
        low, high = start * inputs, stop * inputs
        codes = nibbles(checkpoint[weight].rows(low // 2, -(-high // 2)).flatten(), high_first=True)
        codes = codes[low % 2 :][: high - low]
        values = checkpoint[f"{weight}.quant_map"].read()[codes] * scales()[torch.arange(low, high) // block]
        return values.to(dtype).reshape(stop - start, inputs)

    def codes() -> StoredCodes:
        if inputs % block:
            return StoredCodes.without(kind, f"rows of {inputs} columns are not whole blocks of {block}")
        return table_codes(
            *(f"bitsandbytes {kind}", (outputs, inputs), dtype),
            table=checkpoint[f"{weight}.quant_map"].read(),
            codes=lambda start, stop: nibbles(
                checkpoint[weight].rows(start * inputs // 2, stop * inputs // 2).reshape(stop - start, -1),
                high_first=True,
            ),
            scales=lambda *at: scales().reshape(outputs, -1)[slice(*at)],
        )

    return PackedWeight(Weight(dtype, (outputs, inputs), rows, codes=codes), tuple(parts))


def _state(checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Read and check the quantization state."""
    try:
        state = json.loads(bytes(checkpoint[name].read().to(torch.uint8).tolist()).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise SourceError(f"expected JSON in {name!r}: {error}") from error
    state = state if isinstance(state, dict) else {}
    shape, dtype = state.get("shape"), state.get("dtype")
    sound = isinstance(shape, list) and len(shape) == 2 and all(map(is_size, shape))
    if not (sound and is_size(state.get("blocksize")) and isinstance(dtype, str) and dtype in _DTYPES):
        raise SourceError(f"expected shape, blocksize and dtype in {name!r}, got {str(state)[:120]}")
    if state.get("nested_blocksize") is None:
        return {key: value for key, value in state.items() if key != "nested_blocksize"}
    offset = state.get("nested_offset")
    moderate = isinstance(offset, int | float) and abs(offset) < _LARGEST_OFFSET
    if not is_size(state["nested_blocksize"]) or not moderate:
        raise SourceError(f"expected nested_blocksize and nested_offset in {name!r}, got {str(state)[:120]}")
    return dict(state)


def _eight_bit(checkpoint: Checkpoint, name: str) -> PackedWeight:
    weight, scale = f"{name}.weight", f"{name}.SCB"
    shape = shape_of(checkpoint, weight, 2)
    require_shape(checkpoint, weight, shape, torch.int8)
    require_shape(checkpoint, scale, shape[:1])
    parts = [weight, scale, f"{name}.weight_format"]

    def rows(start: int, stop: int) -> Tensor:
        largest = checkpoint[scale].read()[start:stop].float()
        return checkpoint[weight].rows(start, stop).float() * largest[:, None] * _ROW_UNIT

    def codes() -> StoredCodes:
        def steps(start: int, stop: int) -> Tensor:
            return checkpoint[scale].read()[start:stop, None].float() * _ROW_UNIT

        kind = "bitsandbytes int8"
        return byte_codes(
            kind, (shape[0], shape[1]), torch.float32, lambda *at: checkpoint[weight].rows(*at), steps
        )

    held = tuple(part for part in parts if part in checkpoint)
    return PackedWeight(Weight(torch.float32, shape, rows, codes=codes), held)
