"""OpenVINO IRs as sources: what is read of them, what they become, and which are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("openvino")

from infer import optimize  # noqa: E402
from infer.errors import InferError, NotUsableError, SourceError, UsageError  # noqa: E402
from infer.load import load  # noqa: E402
from infer.load.identification.identify import identify  # noqa: E402
from infer.load.sources.openvino_ir import load_openvino  # noqa: E402
from infer.plan import Plan  # noqa: E402
from infer.predict.predictor import Predictor  # noqa: E402
from infer.run.float_reference import takes  # noqa: E402
from tests.support.openvino_files import ROWS, write_ir  # noqa: E402

pytestmark = pytest.mark.openvino


def test_inputs_and_sizes_are_read_and_the_batch_is_found(tmp_path: Path) -> None:
    write_ir(tmp_path / "m.xml")
    found = load(Plan(source=str(tmp_path / "m.xml")), tried=takes)
    assert found.kind == "openvino"
    assert [spec.format() for spec in found.inputs] == ["x=float32[batch,6]"]
    assert [spec.format() for spec in found.meta["outputs"]] == [
        "twice=float32[batch,6]",
        "product=float32[batch,4]",
    ]
    assert found.weight_bytes == sum((tmp_path / f"m{end}").stat().st_size for end in (".xml", ".bin"))


@pytest.mark.parametrize("named", [True, False], ids=["named", "without names"])
def test_an_ir_becomes_an_artifact_that_answers_the_same(tmp_path: Path, named: bool) -> None:
    weight = write_ir(tmp_path / "m.xml", named=named)
    plan = Plan(source=str(tmp_path / "m.xml"), batches=())
    made = optimize(plan, tmp_path / "m.infer")
    assert made.manifest.backend == "openvino"
    assert any(
        "gated against itself: OpenVINO, which alone runs an IR" in line for line in made.manifest.verdict
    )
    assert (tmp_path / "m.infer" / "compiled" / "model.xml").read_bytes() == (tmp_path / "m.xml").read_bytes()
    x = np.random.default_rng(1).standard_normal((3, ROWS)).astype(np.float32)
    with Predictor.load(tmp_path / "m.infer") as predictor:
        answers = predictor.predict(x)
    assert list(answers) == (["twice", "product"] if named else ["output_0", "output_1"])
    twice, product = answers.values()
    np.testing.assert_array_equal(twice, x + x)
    np.testing.assert_allclose(product, x @ weight, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"quant": "int8"}, UsageError, "an OpenVINO IR runs as it is, with --quant none.*converted from"),
        ({"backend": "ort"}, NotUsableError, "OpenVINO alone runs. Use --backend openvino"),
        ({"backend": "eager"}, NotUsableError, "OpenVINO alone runs. Use --backend openvino"),
        ({"dtype": "float16"}, InferError, "keeps its own dtype"),
    ],
)
def test_what_an_ir_can_not_become_is_refused(
    tmp_path: Path, options: dict[str, str], error: type[InferError], says: str
) -> None:
    write_ir(tmp_path / "m.xml")
    with pytest.raises(error, match=says):
        optimize(Plan(source=str(tmp_path / "m.xml"), batches=(), **options), tmp_path / "m.infer")
    assert not (tmp_path / "m.infer").exists()


def _without_weights(path: Path) -> None:
    path.with_suffix(".bin").unlink()


def _cut_off(path: Path) -> None:
    path.with_suffix(".bin").write_bytes(b"\0" * 50)


def _damaged(path: Path) -> None:
    path.write_text(path.read_text()[:-40])


def _stateful(path: Path) -> None:
    path.write_text(path.read_text().replace('type="Add"', 'type="ReadValue"'))


def _of_text(path: Path) -> None:
    path.write_text(path.read_text().replace('element_type="f32"', 'element_type="string"', 1))


def _old(path: Path) -> None:
    path.write_text(path.read_text().replace('version="11"', 'version="7"'))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (_without_weights, SourceError, "no m.bin beside its XML"),
        (_cut_off, SourceError, "cut off: expected at least 96 bytes, got 50"),
        (_damaged, SourceError, "XML of the IR is damaged"),
        (_stateful, NotUsableError, "keeps state from call to call .1 ReadValue"),
        (_of_text, NotUsableError, "'x' is of type string"),
        (_old, NotUsableError, "of version 7, and OpenVINO reads those from 10"),
    ],
)
def test_irs_that_can_not_be_opened_are_named(
    tmp_path: Path, change: Callable[[Path], None], error: type[InferError], says: str
) -> None:
    write_ir(tmp_path / "m.xml")
    change(tmp_path / "m.xml")
    with pytest.raises(error, match=says):
        load_openvino(Plan(source=str(tmp_path / "m.xml")))


@pytest.mark.parametrize("begin", [b"", b"\xef\xbb\xbf", b'<?xml version="1.0"?>\n<!-- by --><!-- me -->\n'])
def test_an_ir_is_known_by_its_beginning(tmp_path: Path, begin: bytes) -> None:
    (tmp_path / "m").write_bytes(begin + b'<net name="m" version="11"><layers/></net>')
    assert identify(tmp_path / "m").kind == "openvino"
