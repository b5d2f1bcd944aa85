"""Forms of quantized weights: block types of GGUF files, and methods of Hugging Face folders.

Columns: the codes are carried over (or the weight is converted, with its relative error); bits of a weight in memory,
behind those of the file; decoded weights are bit-equal to those of the format's own package or formula; `infer export`
writes the form, bit-equal to what the package writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.models.checks import NONE, REFUSED, Cell, Cells, attempt
from infer.compress.formats import keep
from infer.export import FORMS, export_model
from infer.export.gguf_writer import encode
from infer.load.gguf.block_codes import split_blocks
from infer.load.gguf.block_types import BLOCK_TYPES, BlockType
from infer.plan import Plan
from tests.support.quantized_layers import CASES, opened

TITLE = "Quantized sources"
COLUMNS = ("codes", "bits", "own reader", "written")
ROWS, COLUMNS_OF_A_ROW = 64, 512
# What compressed-tensors folders are written as.
WRITTEN = {"packed int4": "int4", "packed int8": "int8"}


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row."""
    yield from ENTRIES[name](folder)


def bits_of(tensors: dict[str, Tensor]) -> float:
    """Return the bits of a weight in the tensors of `keep`, without tables and orders of columns."""
    held = sum(t.numel() * t.itemsize for n, t in tensors.items() if n not in keep.SHARED)
    return 8 * held / (ROWS * COLUMNS_OF_A_ROW)


def shown_bits(stored: float, tensors: dict[str, Tensor]) -> Cell:
    """Return the cell of the bits of a weight, of the file and in memory."""
    return attempt(lambda: f"{stored:.4g}; in memory {bits_of(tensors):.4g}")


def gguf_type(kind: BlockType, folder: Path) -> Cells:
    """Compute the row of a block type."""
    import gguf

    count = ROWS * COLUMNS_OF_A_ROW // kind.block
    raw = np.random.default_rng(0).integers(0, 256, (count, kind.num_bytes), dtype=np.uint8)
    blocks = torch.from_numpy(raw)
    assert kind.decode is not None
    decoded = kind.decode(blocks).reshape(ROWS, COLUMNS_OF_A_ROW)
    tensors = split_blocks(kind, blocks, ROWS)

    def carried() -> str:
        assert _equal(keep.dequantize(tensors), decoded), "the codes stand for other weights"
        return "carried over exactly"

    def read() -> str:
        type_ = gguf.GGMLQuantizationType[kind.name]
        expected = gguf.quants.dequantize(raw.reshape(ROWS, -1), type_)
        assert _equal(decoded, torch.from_numpy(expected.copy())), "other weights than the gguf package's"
        return "bit-equal to gguf's"

    def written() -> str:
        if kind.name not in FORMS["gguf"]:
            export_model("m", "gguf", folder / "m.gguf", kind=kind.name)
        rows = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
        expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind.name])
        assert encode(torch.from_numpy(rows), kind.name).numpy().tobytes() == expected.tobytes(), (
            "other bytes"
        )
        return "bit-equal to gguf's"

    yield "codes", attempt(carried)
    yield "bits", shown_bits(8 * kind.num_bytes / kind.block, tensors)
    yield "own reader", attempt(read)
    yield "written", attempt(written)


def method(case: str, folder: Path) -> Cells:
    """Compute the row of a method of Hugging Face folders; `weight` is made by the method's formula."""
    parts, weight, settings = CASES[case]((ROWS, COLUMNS_OF_A_ROW), torch.Generator().manual_seed(0))
    reader = opened(parts, settings)
    codes = reader.codes("layer.weight")
    assert codes is not None
    if codes.refused:
        tensors = keep.quantize(weight.float(), None, Plan(source="m", quant="keep"))
    else:
        tensors = codes.rows(0, ROWS) | ({} if codes.order is None else {"order": codes.order})
    found = keep.dequantize(tensors).to(weight.dtype)
    error = float((found.double() - weight.double()).norm() / weight.double().norm())

    def carried() -> str:
        if codes.refused:
            return f"converted to int8:weight, relative error {error:.2g}: {codes.refused}"
        assert error < 1e-6, f"relative error {error:.2g}"
        return "carried over exactly" if error == 0 else "carried over, but for a rounding of float32"

    def read() -> str:
        assert _equal(reader.read("layer.weight"), weight), "other weights than those of the formula"
        return "bit-equal to its formula"

    def written() -> str:
        if case not in WRITTEN:
            export_model("m", "compressed-tensors", folder / "m", kind=case)
        return f"--to compressed-tensors --type {WRITTEN[case]}"

    held = sum(tensor.numel() * tensor.itemsize for tensor in parts.values())
    yield "codes", attempt(carried)
    yield "bits", shown_bits(8 * held / weight.numel(), tensors)
    yield "own reader", attempt(read)
    yield "written", attempt(written)


def refused(settings: dict[str, object], folder: Path) -> Cells:
    """Compute the row of a form that is not read."""
    cell = attempt(lambda: str(opened({"weight": torch.ones(4, 4)}, settings)))
    assert cell.outcome == REFUSED, "expected a refusal"
    yield "codes", cell
    yield from ((column, Cell(NONE)) for column in COLUMNS[1:])


def _equal(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _entries() -> Iterator[tuple[str, Callable[[Path], Cells]]]:
    for kind in BLOCK_TYPES.values():
        if kind.decode is not None:
            yield f"GGUF {kind.name}", partial(gguf_type, kind)
    for case in CASES:
        yield case, partial(method, case)
    yield "aqlm", partial(refused, {"quant_method": "aqlm"})
    yield "gptq, 3 bit", partial(refused, {"quant_method": "gptq", "bits": 3})
    marlin = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
    yield "gptq, marlin", partial(refused, marlin)
    gemv = {"quant_method": "awq", "bits": 4, "version": "gemv"}
    yield "awq, gemv", partial(refused, gemv)


ENTRIES: dict[str, Callable[[Path], Cells]] = dict(_entries())
