"""The newest table of engines (`make trt`): each cell is built or refused by name, and what is packed is smaller."""

from __future__ import annotations

import json

import msgspec
import pytest

from backends.trt import libraries
from bench.gpu.tensorrt_forms import Cell, page_text
from bench.shared.repository import RESULTS

PATHS = sorted(RESULTS.glob("tensorrt-*.json"))
# A format of linear layers in a model of convolutions, as `infer optimize` refuses it.
OF_THE_FORMAT = ("refused, only ", "no layer of this model can be ")
KERNELS = 64_000  # bytes that the builder may keep of padding and constants


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return msgspec.convert(json.loads(PATHS[-1].read_bytes())["cells"], list[Cell])


def test_every_table_cell_is_built_or_refused_for_a_known_reason(cells: list[Cell]) -> None:
    for cell in cells:
        assert cell.outcome in ("built", "refused"), cell
        if cell.outcome == "refused" and not cell.why.startswith(OF_THE_FORMAT):
            assert cell.why == libraries.lacking(cell.sm.split(), cell.quant, cell.dtype)


def test_engines_hold_no_more_weights_than_their_file(cells: list[Cell]) -> None:
    for cell in cells:
        if cell.outcome == "built":
            assert (cell.weight_bytes or 0) <= (cell.onnx_bytes or 0) * 1.02 + KERNELS, cell


def test_packed_weights_are_smaller_than_16_bits(cells: list[Cell]) -> None:
    floats = {
        (cell.model, cell.sm): cell.weight_bytes or 0
        for cell in cells
        if cell.outcome == "built" and cell.quant == "none" and cell.dtype != "float32"
    }
    for cell in cells:
        if cell.outcome == "built" and cell.quant != "none" and not cell.why.startswith("decoded"):
            assert (cell.weight_bytes or 0) < 0.85 * floats[cell.model, cell.sm], cell


def test_the_page_is_rendered_from_the_results(cells: list[Cell]) -> None:
    assert PATHS[-1].with_suffix(".md").read_text().endswith(page_text(cells))
