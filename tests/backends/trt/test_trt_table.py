"""The newest table of engines (`make trt`): each cell is built or refused by name, and what is packed is smaller."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from backends.trt import libraries
from bench.gpu import tensorrt_forms
from bench.gpu.tensorrt_forms import Cell, Results, cells_of_today, page_text, stdout_for_results
from bench.shared.repository import RESULTS

PATHS = sorted(RESULTS.glob("tensorrt-*.json"))
# A format of linear layers in a model of convolutions, as `infer optimize` refuses it.
OF_THE_FORMAT = ("refused, only ", "no layer of this model can be ")
KERNELS = 64_000  # bytes that the builder may keep of padding and constants


@pytest.fixture(scope="module")
def cells() -> list[Cell]:
    return msgspec.json.decode(PATHS[-1].read_bytes(), type=Results).cells


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
    head = msgspec.json.decode(PATHS[-1].read_bytes())
    text = page_text(cells, head["builder"], head["date"])
    assert PATHS[-1].with_suffix(".md").read_text() == text


def test_a_partial_run_keeps_the_other_table_cells_of_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tensorrt.json"
    monkeypatch.setattr(tensorrt_forms, "result_path", lambda _: path)
    one, two, three = (
        Cell(model="bert", quant=q, dtype="float16", outcome=o)
        for q, o in (("none", "built"), ("int4", "built"), ("nf4", "failed"))
    )
    assert cells_of_today([one], True) == []
    path.write_bytes(msgspec.json.encode(Results([one, two, three])))
    assert cells_of_today([two, three], False) == [one]
    assert cells_of_today([two, three], True) == [one, two]


def test_native_output_does_not_mix_with_results(capfd: pytest.CaptureFixture[str]) -> None:
    with stdout_for_results() as results:
        os.write(1, b"WARNING: of the builder\n")
        print("of Python", flush=True)
        print("a result", file=results, flush=True)
    print("after", flush=True)
    said = capfd.readouterr()
    assert said.out == "a result\nafter\n"
    assert said.err == "WARNING: of the builder\nof Python\n"
