"""Identification of sources by content: every supported kind, and every unsupported one by name."""

from __future__ import annotations

import gzip
import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from infer.errors import InferError, SourceError, UnsafeSourceError, UsageError
from infer.load import identify, load
from infer.plan import Plan
from tests.support.foreign_files import FOREIGN, IR, Maker, folder, text


class Payload:
    """Would create a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


def save_script(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.script(nn.Linear(3, 2)).save(str(path))


def save_program(path: Path) -> None:
    torch.export.save(torch.export.export(nn.Linear(3, 2), (torch.ones(2, 3),)), path)


def save_onnx(path: Path) -> None:
    from onnx import TensorProto, helper, save

    value = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", value[:1], value[1:])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)


def save_legacy(path: Path) -> None:
    torch.save(nn.Linear(3, 2).state_dict(), path, _use_new_zipfile_serialization=False)


KINDS: dict[str, Callable[[Path], None]] = {
    "state-dict": lambda path: torch.save(nn.Linear(3, 2).state_dict(), path),
    "module": lambda path: torch.save(nn.Linear(3, 2), path),
    "torchscript": save_script,
    "exported": save_program,
    "legacy-state-dict": save_legacy,
    "legacy-module": lambda path: torch.save(nn.Linear(3, 2), path, _use_new_zipfile_serialization=False),
    "safetensors": lambda path: save_file({"a": torch.ones(2)}, path),
    "onnx": save_onnx,
}


@pytest.mark.parametrize("kind", KINDS)
def test_sources_are_identified_by_content_for_any_suffix(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "model.weights"
    KINDS[kind](path)
    found = identify(path)
    assert found.kind == kind
    assert found.code == (kind in ("module", "torchscript", "exported", "legacy-module"))


@pytest.mark.parametrize("length", [0x280, 0x480, 0x178, 0x9C78])
def test_safetensors_of_any_header_length_are_no_pickles(length: int, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"x": torch.zeros(2)}, path, {"pad": ""})
    short = int.from_bytes(path.read_bytes()[:8], "little")
    save_file({"x": torch.zeros(2)}, path, {"pad": "." * (length - short)})
    assert int.from_bytes(path.read_bytes()[:8], "little") == length
    assert identify(path).kind == "safetensors"


@pytest.mark.parametrize("kind", ["module", "legacy-module"])
def test_pickled_modules_list_what_makes_them_code(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "a.pt")
    assert "torch.nn.modules.linear.Linear" in identify(tmp_path / "a.pt").globals


def test_folders_and_python_recipes_are_identified(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    assert identify(tmp_path).kind == "huggingface"
    assert identify(Path("net.py:build")).kind == "recipe"


def cut(kind: str, size: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        KINDS[kind](path)
        path.write_bytes(path.read_bytes()[:size])

    return make


WRONG: dict[str, tuple[Maker, str]] = {
    "missing": (lambda path: None, "there is no such file or folder"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "a link to a file that is not there"),
    "pipe": (lambda path: os.mkfifo(path), "got a device or a pipe"),
    "empty": (text(b""), r"empty \(0 bytes\)"),
    "text": (text(b"hello there\nworld"), "got text that begins 'hello there'"),
    "long text": (text("größe ".encode() * 500), "got text that begins"),
    "html": (text(b"<!DOCTYPE html><html>404"), r"a web page \(HTML\)"),
    "lfs": (text(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "a git-LFS pointer"),
    "gzip": (text(gzip.compress(b"x")), "a gzip file"),
    "npy": (lambda path: np.save(path.open("wb"), np.ones(3)), r"one NumPy array \(.npy\)"),
    "random": (text(bytes(range(200, 256)) * 20), "not a model in any format known here"),
    "gguf": (text(b"GGUF\3\0\0\0"), "bytes of header at 8, got a file of 8: truncated"),
    "pickle": (text(pickle.dumps({"a": 1})), "a plain Python pickle"),
    "truncated .pt": (cut("state-dict", 700), "a truncated zip"),
    "truncated safetensors": (
        cut("safetensors", 60),
        "expected .* bytes of header, got a file of 60: truncated",
    ),
    "truncated safetensors data": (cut("safetensors", -4), "expected 8 bytes of tensors, got 4: truncated"),
    "truncated onnx": (cut("onnx", 40), "a truncated ONNX model: expected at least"),
    "empty folder": (folder(), "a folder without config.json: it holds nothing"),
    "other folder": (folder("a.txt"), "a folder without config.json: it holds a.txt"),
    "artifact": (folder("manifest.json"), "It is an artifact already"),
    "config only": (folder("config.json"), "config.json but without model.safetensors or pytorch_model.bin"),
    "other pickles": (
        folder("config.json", "training_args.bin"),
        "without .* pytorch_model.bin: it holds config.json",
    ),
    "no config": (folder("model.safetensors"), "safetensors but no config.json"),
}


WRONG |= FOREIGN
NAMED: dict[str, tuple[str, str]] = {
    "model.plan": ("a TensorRT engine", "the model it was built from"),
    "model.pdiparams": ("Paddle parameters", "paddle2onnx"),
    "model.msgpack": ("Flax weights", "safetensors"),
}


@pytest.mark.parametrize("name", NAMED)
def test_unsupported_files_are_named_by_their_suffix(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(bytes(range(200, 256)) * 20)
    says, hint = NAMED[name]
    with pytest.raises(SourceError, match=f"{says}.*{hint}"):
        identify(tmp_path / name)


def test_weights_beside_an_openvino_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(range(200, 256)) * 20)
    (tmp_path / "model.xml").write_bytes(IR)
    with pytest.raises(SourceError, match="the weights of an OpenVINO model"):
        identify(tmp_path / "model.bin")


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("case", WRONG)
def test_unsupported_sources_are_named_and_exit_with_3(tmp_path: Path, case: str) -> None:
    make, sentence = WRONG[case]
    path = tmp_path / "source"
    make(path)
    with pytest.raises(SourceError, match=sentence) as caught:
        identify(path)
    assert caught.value.exit_code == 3
    assert str(path) in str(caught.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pt"
    path.write_bytes(b"x")
    path.chmod(0)
    with pytest.raises(SourceError, match="may not be read"):
        identify(path)


def test_a_python_source_without_a_factory_is_a_usage_error(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text("import torch\n")
    with pytest.raises(UsageError, match=r"net\.py:build"):
        identify(path)


@pytest.mark.parametrize("form", ["zip", "legacy", "pickle"])
def test_a_pickle_payload_is_listed_and_never_executed(tmp_path: Path, form: str) -> None:
    path, marker = tmp_path / "a.pt", tmp_path / "ran"
    value = {"weight": torch.ones(2), "x": Payload(marker)}
    if form == "pickle":
        path.write_bytes(pickle.dumps({"x": Payload(marker)}))
    else:
        torch.save(value, path, _use_new_zipfile_serialization=form == "zip")
    with pytest.raises(SourceError, match=r"posix\.system") as caught:
        load(Plan(source=str(path), data="random"))
    assert form == "pickle" or isinstance(caught.value, UnsafeSourceError)
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["module", "torchscript", "exported", "legacy-module"])
def test_code_is_refused_without_trust_with_an_alternative(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.pt"
    KINDS[kind](path)
    with pytest.raises(UnsafeSourceError, match="it is code.*--trust-code") as caught:
        load(Plan(source=str(path), data="random"))
    assert caught.value.exit_code == 3


def test_a_file_truncated_anywhere_raises_an_infer_error(tmp_path: Path) -> None:
    path = tmp_path / "a"
    for kind in ("state-dict", "safetensors", "onnx"):
        KINDS[kind](path)
        whole = path.read_bytes()
        for size in range(0, len(whole), max(len(whole) // 25, 1)):
            path.write_bytes(whole[:size])
            with pytest.raises(InferError) as caught:
                load(Plan(source=str(path), data="random", model="none.py:build"))
            assert caught.value.exit_code == 3, (kind, size)
