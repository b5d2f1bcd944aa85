"""Of the user's --data an artifact holds copies of two rows at most, and none with --no-golden."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from infer import Plan, Predictor, optimize
from infer.artifact import golden
from infer.cli import main
from infer.errors import UsageError
from infer.graph import capture, storage
from infer.library_errors import quiet
from infer.report import inspection
from infer.spec import TensorSpec
from tests.support.llm_artifacts import tiny

NET = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
"""
ROWS = 24


@pytest.fixture
def source(tmp_path: Path) -> str:
    (tmp_path / "net.py").write_text(NET)
    return f"{tmp_path / 'net.py'}:build"


def contents(folder: Path) -> Iterator[tuple[str, bytes]]:
    """Every file below a folder, those in zip files too, however deep."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield from unpacked(path.name, path.read_bytes(), path)


def unpacked(name: str, data: bytes, file: Path | None = None) -> Iterator[tuple[str, bytes]]:
    import io

    yield name, data
    if data[:2] == b"PK" and zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from unpacked(f"{name}:{member}", archive.read(member))


def found(folder: Path, marks: list[list[bytes]]) -> dict[int, list[str]]:
    """Rows of which any mark stands in a file, and the files."""
    where: dict[int, list[str]] = {}
    for name, data in contents(folder):
        for row, pieces in enumerate(marks):
            if any(piece in data for piece in pieces):
                where.setdefault(row, []).append(name)
    return where


def marks_of(rows: np.ndarray) -> list[list[bytes]]:
    """Pairs of neighbours in each row, as they are and in the dtypes that a row might be stored in."""
    flat = rows.reshape(len(rows), -1)
    kinds = ("float32", "float64", "float16") if flat.dtype.kind == "f" else ("int64", "int32")
    width = 4 if flat.dtype.kind == "f" else 6
    starts = range(0, flat.shape[1] - width, width)
    return [[row[i : i + width].astype(kind).tobytes() for i in starts for kind in kinds] for row in flat]


def numbers(tmp_path: Path) -> np.ndarray:
    rows = np.random.default_rng(7).standard_normal((ROWS, 3, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "private.npz", input=rows)
    return rows


def plan(source: str, data: Path | str, **changes: object) -> Plan:
    asked = Plan(
        source=source,
        backend="eager",
        quant="int8",
        inputs=("input=float32[batch,3,8,8]",),
        data=str(data),
        batches=(),
        max_error=1.0,
    )
    return asked.with_(**changes)


@pytest.mark.parametrize(
    ("backend", "quant"),
    [
        ("eager", "int8"),
        ("eager", "none"),
        ("ort", "int8"),
        pytest.param("inductor", "int8", marks=pytest.mark.slow),
    ],
)
def test_an_artifact_holds_two_rows_of_arrays_at_most(
    tmp_path: Path, source: str, backend: str, quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    shared = Path(os.environ["INFER_CACHE"]).resolve()
    (cache / "inductor").mkdir(parents=True)
    for compiled in ("kernels", "inductor/precompiled_headers"):  # of the project's and torch's own code
        (shared / compiled).mkdir(parents=True, exist_ok=True)
        (cache / compiled).symlink_to(shared / compiled)
    monkeypatch.setenv("INFER_CACHE", str(cache))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    marks = marks_of(numbers(tmp_path))
    data = tmp_path / "private.npz"
    made = optimize(plan(source, data, backend=backend, quant=quant), tmp_path / "real.infer").path
    held = found(made, marks)
    assert len(held) == 2
    assert {name for names in held.values() for name in names} == {"inputs.safetensors"}
    assert found(cache, marks) == {}
    if backend == "inductor":  # a second one would be compiled from the same
        return
    asked = plan(source, data, backend=backend, quant=quant, golden=False)
    bare = optimize(asked, tmp_path / "bare.infer").path
    assert found(bare, marks) == found(cache, marks) == {}
    with Predictor.load(bare) as predictor:
        predictor.self_test()


def test_an_artifact_holds_two_images_at_most(tmp_path: Path, source: str) -> None:
    images = pytest.importorskip("PIL.Image")
    rows = np.random.default_rng(3).integers(0, 256, (ROWS, 8, 8, 3), dtype=np.uint8)
    (tmp_path / "photos").mkdir()
    for index, row in enumerate(rows):
        images.fromarray(row).save(tmp_path / "photos" / f"{index:02d}.png")
    as_read = np.moveaxis(rows, -1, 1)
    pixels = marks_of((as_read / np.float32(255)).astype(np.float32))
    raw = [[row.tobytes()[i : i + 12] for i in range(0, 180, 12)] for row in as_read]
    for marks, golden_rows in ((pixels, 2), (raw, 0)):
        made = optimize(plan(source, tmp_path / "photos"), tmp_path / f"{golden_rows}.infer").path
        assert len(found(made, marks)) == golden_rows
    bare = optimize(plan(source, tmp_path / "photos", golden=False), tmp_path / "bare.infer").path
    assert found(bare, pixels) == found(bare, raw) == {}


@pytest.fixture
def letters(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    chance = np.random.default_rng(5)
    text = "".join(chr(97 + c) for c in chance.integers(0, 26, 128 * 8))
    (tmp_path / "private.txt").write_text(text)
    return text


def windows(text: str) -> np.ndarray:
    """Token ids of `tiny`, which has a token for each byte: letters are in order, whatever the first one is."""
    return np.frombuffer(text.encode(), np.uint8).astype(np.int64).reshape(-1, 128)


def test_a_language_model_holds_16_tokens_of_two_texts_at_most(tmp_path: Path, letters: str) -> None:
    made = tiny(tmp_path, speaks=True, data=str(tmp_path / "private.txt"))
    kept = load_file(made / "golden/inputs.safetensors")["input_ids"]
    assert kept.shape == (2, golden.TOKENS)
    ids = windows(letters)
    ids = ids + (int(kept[0, 0]) - ids[0, 0])
    early, late = marks_of(ids[:, : golden.TOKENS]), marks_of(ids[:, golden.TOKENS :])
    assert len(found(made, early)) == 2
    assert found(made, late) == {}
    assert not [name for name, data in contents(made) if letters[300:320].encode() in data]


@pytest.mark.slow
def test_a_language_model_can_hold_no_token_of_the_data(tmp_path: Path, letters: str) -> None:
    bare = tiny(tmp_path, speaks=True, data=str(tmp_path / "private.txt"), golden=False)
    kept = load_file(bare / "golden/inputs.safetensors")["input_ids"]
    assert kept.unique().numel() > 4
    steps = np.diff(windows(letters)[:, : golden.TOKENS])
    assert not [row for row in np.diff(kept.numpy()) if (row == steps).all(axis=1).any()]


def test_inspect_lists_the_data_that_an_artifact_holds(
    tmp_path: Path, source: str, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers(tmp_path)
    data = tmp_path / "private.npz"
    made = optimize(plan(source, data), tmp_path / "real.infer")
    assert inspection.inspect(made.path)["data"] == [
        f"2 rows of inputs from --data {data}: input float32 [2, 3, 8, 8]; and the outputs for them",
        f"the path of --data, {data}, and its sha256",
    ]
    assert "--no-golden" not in made.report.command
    assert [f.value for f in made.manifest.findings if f.what == "golden inputs"] == [2]
    argv = [
        "optimize",
        source,
        "--backend",
        "eager",
        "--input",
        "input=float32[batch,3,8,8]",
        "--data",
        str(data),
    ]
    bare = tmp_path / "bare.infer"
    assert main([*argv, "--no-golden", "--batch", "1", "--allow-slower", "--output", str(bare)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(bare), "--json"]) == 0
    lines = json.loads(capsys.readouterr().out)["data"]
    assert lines[0].startswith("synthetic inputs (--no-golden): input float32 [2, 3, 8, 8]")
    assert json.loads((bare / "report.json").read_bytes())["command"].split().count("--no-golden") == 1


def test_inspect_names_rows_that_an_older_version_stored(
    tmp_path: Path, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers(tmp_path)
    monkeypatch.setattr(capture, "_zeros", lambda program: program.example_inputs)
    monkeypatch.setattr(storage, "_examples_without_data", lambda examples: examples)
    made = optimize(plan(source, tmp_path / "private.npz"), tmp_path / "old.infer").path
    lines = inspection.inspect(made)["data"]
    assert any("bytes of example inputs in graph.pt2" in line for line in lines)


def test_golden_inputs_that_share_memory_are_stored_apart() -> None:
    shared = torch.arange(12.0).reshape(6, 2)
    specs = (TensorSpec("a", "float32", ("batch", 2)), TensorSpec("b", "float32", ("batch", 2)))
    few = golden.rows_of(specs, {"a": shared, "b": shared}, "tensors")
    assert few["a"].untyped_storage().nbytes() == 2 * 2 * 4
    assert few["a"].data_ptr() != few["b"].data_ptr()


class Reference:
    """A float model of one input, as a runner."""

    def __init__(self, call: object) -> None:
        self.call = call

    def run(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"y": self.call(inputs["x"])}  # type: ignore[operator]


def test_synthetic_inputs_give_finite_outputs() -> None:
    specs = (TensorSpec("x", "float32", ("batch", 4)),)
    logarithm = Reference(torch.log)
    made = golden.record(logarithm, logarithm, specs, {"x": torch.rand(8, 4)}, synthetic=True)
    assert made["inputs"]["x"].shape == (2, 4)
    assert bool(torch.isfinite(made["outputs"]["y"]).all())
    broken = Reference(lambda x: x / 0)
    with pytest.raises(UsageError, match="could not test itself.*--no-golden"):
        golden.record(broken, broken, specs, {"x": torch.rand(8, 4)}, synthetic=True)


def test_a_program_without_example_data_can_be_lowered_again(tmp_path: Path, source: str) -> None:
    numbers(tmp_path)
    made = optimize(plan(source, tmp_path / "private.npz"), tmp_path / "real.infer").path
    program = storage.load(made).exported
    (_, examples) = program.example_inputs
    assert examples["input"].is_contiguous()
    assert not examples["input"].any()
    with quiet():
        again = program.run_decompositions({})
    x = torch.randn(5, 3, 8, 8)
    torch.testing.assert_close(again.module()(input=x), program.module()(input=x))
    assert not [line for line in inspection.inspect(made)["data"] if "graph.pt2" in line]
