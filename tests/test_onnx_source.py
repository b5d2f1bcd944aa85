"""ONNX sources: copied byte by byte, or quantized to int8 by our own forms."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")
onnxruntime = pytest.importorskip("onnxruntime")

from infer.errors import SourceError  # noqa: E402
from infer.onnx import source  # noqa: E402

TEXT = """<ir_version: 8, opset_import: ["" : 17]>
agraph (float[batch, 64] x) => (float[batch, 32] y, float[batch, 8] z)
<float[64, 96] w, float[32, 96] v, float[32] c, float[96, 8] small> {
    h = MatMul(x, w)
    r = Relu(h)
    y = Gemm <transB = 1> (r, v, c)
    z = MatMul(r, small)
}"""


def write(path: Path, *, external: bool = False) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 96), "v": (32, 96), "c": (32,), "small": (96, 8)}
    tensors = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    model = onnx.parser.parse_model(TEXT)
    del model.graph.initializer[:]
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in tensors.items()
    )
    onnx.save(model, str(path), save_as_external_data=external, location="tensors.bin", size_threshold=0)
    return tensors


def run(path: Path, x: np.ndarray) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(str(path)).run(None, {"x": x})


def test_a_copy_takes_its_external_data_along(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx", external=True)
    source.copy(tmp_path / "model.onnx", tmp_path / "there" / "compiled.onnx")
    x = np.ones((2, 64), np.float32)
    for mine, original in zip(
        run(tmp_path / "there" / "compiled.onnx", x), run(tmp_path / "model.onnx", x), strict=True
    ):
        np.testing.assert_array_equal(mine, original)


@pytest.mark.parametrize("location", ["../secret", "/etc/hostname", "absent.bin"])
def test_external_data_outside_the_folder_is_never_read(tmp_path: Path, location: str) -> None:
    (tmp_path / "secret").write_bytes(b"0" * 1000)
    folder = tmp_path / "model"
    folder.mkdir()
    write(folder / "model.onnx", external=True)
    model = onnx.load(str(folder / "model.onnx"), load_external_data=False)
    for tensor in model.graph.initializer:
        tensor.external_data[0].value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(SourceError, match="external data"):
        source.copy(folder / "model.onnx", tmp_path / "out" / "model.onnx")


def test_int8_covers_matmul_and_gemm_but_not_small_ones(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    done = source.quantize(tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", "ort-u8u8")
    assert done.forms == {"dynamic int8, a scale per token": 2}
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    for got, want in zip(
        run(tmp_path / "int8" / "model.onnx", x), run(tmp_path / "model.onnx", x), strict=True
    ):
        assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.02


def test_int8_is_small_on_disk(tmp_path: Path) -> None:
    write(tmp_path / "model.onnx")
    source.quantize(tmp_path / "model.onnx", tmp_path / "int8" / "model.onnx", "ort-u8u8")
    written = sum(file.stat().st_size for file in (tmp_path / "int8").iterdir())
    assert written < (tmp_path / "model.onnx").stat().st_size / 2
