"""An artifact is published whole or not at all, and what was changed afterwards is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import safetensors.numpy

from infer.artifact import store
from infer.errors import ArtifactError, BusyError, ResourceError, UnsafeSourceError
from infer.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


def manifest(**changes: object) -> store.Manifest:
    made = store.Manifest(
        name="toy", made_with="infer test", plan=Plan(source="toy.pt"), choices=(), backend="eager", device="cpu",
        task="tensors", inputs=(), outputs=(), sizes={}, target={}, versions={}, meta={}, verdict=(), findings=(),
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def make(output: Path, content: bytes = b"weights", replace: bool = False) -> Path:
    with store.stage(output, replace=replace) as folder:
        (folder / "weights").mkdir()
        (folder / "weights/a.bin").write_bytes(content)
        store.publish(folder, output, manifest())
    return output


def left_behind(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_published_artifact_verifies_and_nothing_else_is_left(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    store.verify(output, store.read_manifest(output))
    assert store.signed_here(output)
    assert left_behind(tmp_path) == ["toy.infer"]


def test_an_artifact_can_be_read_by_other_users(tmp_path: Path) -> None:
    with store.stage(output := tmp_path / "toy.infer", replace=False) as folder:
        (folder / "weights").mkdir(mode=0o700)
        safetensors.numpy.save_file({"a": np.zeros(2)}, folder / "weights/a.safetensors")
        store.publish(folder, output, manifest())
    closed = [path for path in (output, *output.rglob("*")) if not path.stat().st_mode & 0o004]
    assert closed == []


def test_an_exception_while_staging_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> None:
        with store.stage(tmp_path / "toy.infer", replace=False) as folder:
            (folder / "half").write_text("written")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert left_behind(tmp_path) == []


def test_an_existing_artifact_is_kept_unless_replaced(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer", b"old")
    with pytest.raises(BusyError, match="exists.*--force"):
        make(output, b"new")
    assert (output / "weights/a.bin").read_bytes() == b"old"
    make(output, b"new", replace=True)
    assert (output / "weights/a.bin").read_bytes() == b"new"
    assert left_behind(tmp_path) == ["toy.infer"]


def test_a_failed_replacement_keeps_the_old_one(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer", b"old")
    with pytest.raises(ZeroDivisionError), store.stage(output, replace=True):
        1 / 0  # noqa: B018
    store.verify(output, store.read_manifest(output))
    assert (output / "weights/a.bin").read_bytes() == b"old"


def test_a_folder_of_the_users_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    with pytest.raises(BusyError, match="not an artifact"), store.stage(tmp_path / "mine", replace=True):
        pass


def test_a_second_writer_of_an_artifact_is_refused_as_busy(tmp_path: Path) -> None:
    output = tmp_path / "toy.infer"
    second = store.stage(output, replace=False)
    with (
        store.stage(output, replace=False),
        pytest.raises(BusyError, match=f"process {os.getpid()}"),
        second,
    ):
        pass
    make(output)


def test_leftovers_of_a_killed_writer_are_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".toy.infer.tmp-999999999-abc"
    stale.mkdir()
    make(tmp_path / "toy.infer")
    assert not stale.exists()


def test_a_killed_writer_publishes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, signal, sys; from infer.artifact import store as artifact\n"
        "with artifact.stage(pathlib.Path(sys.argv[1]), replace=False) as folder:\n"
        "    (folder / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "toy.infer")], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert not (tmp_path / "toy.infer").exists()
    make(tmp_path / "toy.infer")
    assert left_behind(tmp_path) == ["toy.infer"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda f: (f / "weights/a.bin").write_bytes(b"weighty"), "weights/a.bin is damaged"),
        (lambda f: (f / "weights/a.bin").unlink(), "a file is missing: weights/a.bin"),
        (lambda f: (f / "extra").write_text("x"), "not in the manifest: extra"),
        (lambda f: (f / "manifest.json").write_text("{"), "the manifest is damaged"),
        (lambda f: (f / "manifest.json").unlink(), "no manifest.json in it"),
    ],
)
def test_damaged_files_are_named_in_the_error(tmp_path: Path, damage, sentence: str) -> None:
    output = make(tmp_path / "toy.infer")
    damage(output)
    with pytest.raises(ArtifactError, match=sentence):
        store.verify(output, store.read_manifest(output))


def test_every_flipped_bit_of_the_manifest_breaks_its_signature(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    data = bytearray((output / "manifest.json").read_bytes())
    for position in range(0, len(data), 37):
        data[position] ^= 1
        (output / "manifest.json").write_bytes(data)
        assert not store.signed_here(output)
        data[position] ^= 1


def test_an_artifact_of_another_user_is_not_trusted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = make(tmp_path / "toy.infer")
    store.require_trust(output, "test")
    monkeypatch.setenv("INFER_CONFIG", str(tmp_path / "other"))
    with pytest.raises(UnsafeSourceError, match="--trust-code"):
        store.require_trust(output, "test")


@pytest.mark.parametrize("format", [1, 2, 3, 99])
def test_another_format_is_refused_with_the_command_that_makes_it_again(tmp_path: Path, format: int) -> None:
    output = make(tmp_path / "toy.infer")
    file = output / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": format}))
    with pytest.raises(
        ArtifactError, match=f"artifact format {format}, this version of infer reads 4"
    ) as error:
        store.read_manifest(output)
    assert f" --plan {file} --output toy-new.infer" in error.value.hint


def test_a_full_disk_raises_a_resource_error_and_leaves_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ResourceError, match="no space left on the disk"),
        store.stage(tmp_path / "t.infer", replace=False),
    ):
        raise OSError(28, "No space left on device")
    assert left_behind(tmp_path) == []
