"""Forms of quantized weights: block types of GGUF files, and methods of Hugging Face folders.

Columns: the codes are carried over (or the weight is converted, with its relative error); bits of a weight in memory,
behind those of the file; decoded weights are bit-equal to those of the format's own package or formula; `infer export`
writes the codes of such a source to GGUF and to compressed-tensors (of float weights it writes Q8_0, Q4_0, Q4_1, int4
and int8, with the bytes of the package); speed over that of llama.cpp on one GGUF file whose weights are mostly of the
type, two Llama shapes (135M, 1B) with random weights, two threads (–: not measured).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bench.models import gguf_speed
from bench.models.checks import NONE, REFUSED, Cell, Cells, attempt
from infer.compress.formats import keep
from infer.export import FORMS
from infer.export.gguf_codes import carry
from infer.export.gguf_writer import encode
from infer.export.packed_linears import carried as carry_packed
from infer.export.packed_linears import quantized
from infer.export.stored_rows import error_text
from infer.kernels.ops.coded_weight import rows_of
from infer.load.gguf.block_types import BLOCK_TYPES, BlockType
from infer.plan import Plan
from infer.weights import StoredCodes, in_memory
from tests.support.quantized_layers import CASES, opened
from tests.support.random_blocks import random_blocks

TITLE = "Quantized sources"
COLUMNS = ("codes", "bits", "own reader", "written")
ROWS, COLUMNS_OF_A_ROW = 64, 512


def run(name: str, folder: Path) -> Cells:
    """Compute the cells of one row."""
    yield from ENTRIES[name](folder)


def measured() -> dict[str, dict[str, str]]:
    """Return what other benchmarks have found, by column and row."""
    return {gguf_speed.COLUMN: {f"GGUF {name}": text for name, text in gguf_speed.speeds().items()}}


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
    raw = finite_blocks(kind, count)
    blocks = torch.from_numpy(raw)
    decoded = kind.decode(blocks).reshape(ROWS, COLUMNS_OF_A_ROW)
    tensors = kind.rows(blocks, ROWS)

    def carried() -> str:
        assert _equal(keep.dequantize(tensors), decoded), "the codes stand for other weights"
        return "carried over exactly"

    def read() -> str:
        type_ = gguf.GGMLQuantizationType[kind.name]
        expected = gguf.quants.dequantize(raw.reshape(ROWS, -1), type_)
        assert _equal(decoded, torch.from_numpy(expected.copy())), "other weights than the gguf package's"
        return "bit-equal to gguf's"

    def written() -> str:
        stored = StoredCodes(kind.name, (ROWS, COLUMNS_OF_A_ROW), partial(rows_of, tensors))
        if kind.name in FORMS["gguf"]:
            rows = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
            expected = gguf.quants.quantize(rows, gguf.GGMLQuantizationType[kind.name])
            encoded = encode(torch.from_numpy(rows), kind.name).numpy().tobytes()
            assert encoded == expected.tobytes(), "other bytes than the package's"
        found = carry(stored)
        assert not isinstance(found, str), found
        assert found.type == kind.name, f"written as {found.type}"
        again = found.encoded(torch.arange(ROWS)).reshape(blocks.shape)
        assert torch.equal(again, blocks), "other bytes than those of the source"
        return f"GGUF {kind.name}, byte for byte; {packed_form(stored, decoded)}"

    yield "codes", attempt(carried)
    yield "bits", shown_bits(8 * kind.num_bytes / kind.block, tensors)
    yield "own reader", attempt(read)
    yield "written", attempt(written)


def method(case: str, folder: Path) -> Cells:
    """Compute the row of a method of Hugging Face folders; `weight` is made by the method's formula."""
    parts, weight, settings = CASES[case]((ROWS, COLUMNS_OF_A_ROW), torch.Generator().manual_seed(0))
    stored = opened(parts, settings)["layer.weight"]
    codes = stored.codes()
    assert codes is not None
    if codes.refused:
        tensors = keep.quantize(weight.float(), None, Plan(source="m", quant="keep"))
    else:
        tensors = codes.rows(0, ROWS) | ({} if codes.order is None else {"order": codes.order})
    found = keep.dequantize(tensors).to(weight.dtype)
    error = _error(found, weight)

    def carried() -> str:
        if codes.refused:
            return f"converted to int8:weight, relative error {error:.2g}: {codes.refused}"
        assert error < 1e-6, f"relative error {error:.2g}"
        return "carried over exactly" if error == 0 else "carried over, but for a rounding of float32"

    def read() -> str:
        assert _equal(stored.read(), weight), "other weights than those of the formula"
        return "bit-equal to its formula"

    def written() -> str:
        found = carry(codes)
        if not isinstance(found, str):
            return f"GGUF {found.type}, {error_text(found.error)}; {packed_form(codes, weight)}"
        q8_0 = BLOCK_TYPES["Q8_0"]
        again = q8_0.decode(encode(weight.float(), "Q8_0").reshape(-1, q8_0.num_bytes))
        away = f"converted to GGUF Q8_0, relative error {_error(again.reshape(weight.shape), weight):.2g}"
        return f"{away}; {packed_form(codes, weight)}"

    held = sum(tensor.numel() * tensor.itemsize for tensor in parts.values())
    yield "codes", attempt(carried)
    yield "bits", shown_bits(8 * held / weight.numel(), tensors)
    yield "own reader", attempt(read)
    yield "written", attempt(written)


def finite_blocks(kind: BlockType, count: int) -> np.ndarray:
    """Return random blocks whose scales are numbers, uint8 [count, bytes]."""
    raw, seed = random_blocks(kind, count), 0
    while bool((bad := ~kind.decode(raw).isfinite().all(1)).any()):
        seed += 1
        raw[bad] = random_blocks(kind, int(bad.sum()), seed)
    return raw.numpy()


def packed_form(codes: StoredCodes, weight: Tensor) -> str:
    """Return how `infer export --to compressed-tensors` writes codes, or else the weight that they stand for."""
    found = carry_packed(codes)
    if isinstance(found, str):
        made = quantized(in_memory({"w": weight.float()}), "w", 8, COLUMNS_OF_A_ROW, torch.bfloat16)
        code, scale, _ = made.give(0, ROWS)
        error = _error((code - 128).float() * scale.float(), weight)
        return f"converted to compressed-tensors int8, relative error {error:.2g}"
    one, error = found
    zeros = " with zero points" if one.zeros else ""
    return f"compressed-tensors int{one.bits}{zeros}, {error_text(error)}"


def refused(settings: dict[str, object], folder: Path) -> Cells:
    """Compute the row of a form that is not read."""
    cell = attempt(lambda: str(opened({"weight": torch.ones(4, 4)}, settings)))
    assert cell.outcome == REFUSED, "expected a refusal"
    yield "codes", cell
    yield from ((column, Cell(NONE)) for column in COLUMNS[1:])


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def _equal(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


def _entries() -> Iterator[tuple[str, Callable[[Path], Cells]]]:
    for kind in BLOCK_TYPES.values():
        if kind.holds_codes:
            yield f"GGUF {kind.name}", partial(gguf_type, kind)
    for case in CASES:
        yield case, partial(method, case)
    yield "aqlm", partial(refused, {"quant_method": "aqlm"})
    yield "gptq, 5 bit", partial(refused, {"quant_method": "gptq", "bits": 5})
    marlin = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}
    yield "gptq, marlin", partial(refused, marlin)
    gemv = {"quant_method": "awq", "bits": 4, "version": "gemv"}
    yield "awq, gemv", partial(refused, gemv)


ENTRIES: dict[str, Callable[[Path], Cells]] = dict(_entries())
