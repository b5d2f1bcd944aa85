"""Pipes, devices, sockets and links where a file is expected are refused unopened, wherever infer reads a file."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from infer import Plan, Predictor, optimize
from infer.artifact import files as artifact_files
from infer.artifact import store
from infer.artifact.manifest import read_report
from infer.cli import main
from infer.errors import ArtifactError, InferError, SourceError, UsageError
from infer.llm.text.chat_template import ChatTemplate
from infer.llm.text.generation_config import GenerationConfig
from infer.llm.text.tokenizer import LLMTokenizer
from infer.load import identify, read_data
from infer.report import inspection
from infer.serve.http import access_control
from infer.serve.model_repository import ModelRepository, name_and_version
from infer.serve.observability.memory import cache_bytes
from infer.serve.workers.model_loading import is_language_model
from tests.artifact.test_artifact import make, manifest
from tests.load.test_read_samples import ONE

NET = """
import torch
def build():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))
"""


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Fail where something waits for a pipe that nobody writes to."""

    def late(*_: object) -> None:
        raise AssertionError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def pipe(path: Path) -> None:
    os.mkfifo(path)


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def listener(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as server:  # names of sockets are short
        server.bind(path.name)


def folder(path: Path) -> None:
    path.mkdir()


KINDS: dict[str, Callable[[Path], None]] = {
    "pipe": pipe,
    "device": device,
    "socket": listener,
    "folder": folder,
}


@pytest.fixture(params=list(KINDS))
def odd(request: pytest.FixtureRequest) -> Callable[[Path], Path]:
    """Put something that is no regular file at a path, in the place of what is there."""

    def put(path: Path) -> Path:
        path.unlink(missing_ok=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        KINDS[request.param](path)
        return path

    return put


@pytest.mark.parametrize(
    "name", ["weights/a.bin", "manifest.json", "manifest.sig", "golden/inputs.safetensors"]
)
def test_devices_and_links_in_an_artifact_are_refused(tmp_path: Path, odd: Callable, name: str) -> None:
    output = make(tmp_path / "toy.infer")
    said = json.loads((output / "manifest.json").read_bytes())
    said["files"].setdefault(name, "0" * 64)
    if not name.startswith("manifest"):
        (output / "manifest.json").write_text(json.dumps(said))
    odd(output / name)
    with within(10), pytest.raises(ArtifactError):
        store.verify(output, store.read_manifest(output))
    with within(10):
        assert store.signed_here(output) is False or not name.startswith("manifest")
        assert main(["verify", str(output)]) == 3


def rehash(output: Path, **files: str) -> None:
    said = json.loads((output / "manifest.json").read_bytes())
    said["files"] |= files
    (output / "manifest.json").write_text(json.dumps(said))


def test_a_link_to_a_folder_is_refused_even_if_empty(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    (tmp_path / "elsewhere").mkdir()
    (output / "more").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ArtifactError, match="not in the manifest: more"):
        store.verify(output, store.read_manifest(output))
    rehash(output, more="0" * 64)
    with pytest.raises(ArtifactError, match="a file is a link: more"):
        store.verify(output, store.read_manifest(output))


def test_a_folder_that_became_a_link_is_refused(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    (output / "weights").rename(tmp_path / "weights")
    (output / "weights").symlink_to(tmp_path / "weights")
    with pytest.raises(ArtifactError, match="not in the manifest: weights"):
        store.verify(output, store.read_manifest(output))


@pytest.mark.parametrize(
    "name",
    ["../secret", "/etc", "a\nb", "weights/../../x", "a\0b", "a//b", "./a", "", "a\\b", "x" * 2000, "weights/A.BIN"],
)  # fmt: skip
def test_file_names_outside_the_artifact_are_refused(tmp_path: Path, name: str) -> None:
    output = make(tmp_path / "toy.infer")
    rehash(output, **{name: "0" * 64})
    with pytest.raises(ArtifactError):
        store.verify(output, store.read_manifest(output))


def test_a_file_name_that_is_not_utf8_is_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = make(tmp_path / "toy.infer")
    Path(os.fsdecode(bytes(output) + b"/\xff\x1b[2J")).write_text("x")
    assert main(["verify", str(output)]) == 3
    assert "not in the manifest: \\xff\\x1b[2J" in capsys.readouterr().err


def test_a_wrong_file_size_is_reported_before_reading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = make(tmp_path / "toy.infer")
    os.truncate(output / "weights/a.bin", 1 << 40)
    monkeypatch.setattr(artifact_files, "_sha256", lambda path: pytest.fail("it was read"))
    with pytest.raises(ArtifactError, match=r"a.bin is damaged: expected 7 bytes, got 1099511627776"):
        store.verify(output, store.read_manifest(output))
    said = json.loads((output / "manifest.json").read_bytes())
    said["lengths"]["weights/a.bin"] = 1 << 40
    (output / "manifest.json").write_text(json.dumps(said))
    with pytest.raises(ArtifactError, match="the disk stores"):
        store.verify(output, store.read_manifest(output))


def test_a_file_that_grows_while_it_is_read_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "grows"
    path.write_bytes(b"x" * 10)
    real = os.fstat

    def before(descriptor: int) -> os.stat_result:
        told = real(descriptor)
        with path.open("ab") as file:
            file.write(b"more")
        return told

    monkeypatch.setattr(artifact_files.os, "fstat", before)
    with pytest.raises(ArtifactError, match="changed while it was read"):
        artifact_files._sha256(path)


def test_hashes_are_those_of_hashlib(tmp_path: Path) -> None:
    for size in (0, 1, artifact_files.BLOCK - 1, artifact_files.BLOCK, 3 * artifact_files.BLOCK + 5):
        data = os.urandom(size)
        (tmp_path / "f").write_bytes(data)
        assert artifact_files._sha256(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_an_artifact_of_hard_links_opens(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    copy = tmp_path / "copy.infer"
    (copy / "weights").mkdir(parents=True)
    for name in ("weights/a.bin", "manifest.json", "manifest.sig"):
        os.link(output / name, copy / name)
    store.verify(copy, store.read_manifest(copy))


# Sources, data and options.


def test_a_source_that_is_not_a_regular_file_is_refused(
    tmp_path: Path, odd: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    path = odd(tmp_path / "model.pt")
    with within(10):
        assert main(["inspect", str(path)]) == 3
        assert main(["optimize", str(path), "--output", str(tmp_path / "o.infer")]) == 3
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("name", ["d.npz", "d.npy", "d.pt", "d.txt", "d.png"])
def test_data_that_is_not_a_regular_file_is_refused(tmp_path: Path, odd: Callable, name: str) -> None:
    path = odd(tmp_path / name)
    with within(10), pytest.raises((SourceError, UsageError)):
        read_data(str(path), ONE)


def test_plan_template_and_key_files_must_be_regular_files(tmp_path: Path, odd: Callable) -> None:
    from infer.cli.optimize import read_plan
    from infer.llm.text.chat_template import carry

    path = odd(tmp_path / "plan.toml")
    with within(10):
        for read in (
            lambda: read_plan(path, {"source": "x"}),
            lambda: carry(str(path), {}),
            lambda: access_control.read_key_file(path),
        ):
            with pytest.raises(UsageError):
                read()


def test_files_of_a_hugging_face_folder_must_be_regular_files(tmp_path: Path, odd: Callable) -> None:
    from infer.regular_files import read_json
    from infer.weights.safetensors_file import open_safetensors, read_header

    path = odd(tmp_path / "config.json")
    with within(10), pytest.raises(SourceError):
        read_json(path)
    path = odd(tmp_path / "model.safetensors")
    with within(10), pytest.raises(SourceError):
        read_header(path)
    (tmp_path / "config.json").rename(tmp_path / "other")
    (tmp_path / "config.json").write_text("{}")
    with within(10), pytest.raises(InferError):
        identify(tmp_path) and open_safetensors(path)
    (tmp_path / "i.json").write_text(json.dumps({"weight_map": {"w": "model.safetensors"}}))
    with within(10), pytest.raises(SourceError):
        open_safetensors(tmp_path / "i.json")
    odd(tmp_path / "additional_chat_templates/x.jinja")
    with within(10), pytest.raises(ArtifactError):
        ChatTemplate.open(tmp_path)


def test_manifests_read_by_a_server_must_be_regular_files(tmp_path: Path, odd: Callable) -> None:
    place = tmp_path / "m.infer"
    odd(place / "manifest.json")
    with within(10):
        assert is_language_model(place) is False
        assert cache_bytes(place, None, 1 << 30) == 0
        assert [name_and_version(found) for found in ModelRepository([place]).latest()] == [("m", "?")]
        with pytest.raises(ArtifactError):
            read_report(place)


# An artifact whose hashes fit, made by somebody else.


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("foreign")
    (place / "net.py").write_text(NET)
    np.save(place / "d.npy", np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32))
    plan = Plan(
        source=f"{place / 'net.py'}:build",
        backend="ort",
        quant="int8",
        data=str(place / "d.npy"),
        inputs=("input=float32[batch,64]",),
        batches=(),
        max_error=1.0,
    )
    return optimize(plan, place / "net.infer").path


@pytest.fixture
def foreign(original: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a maker of copies of an artifact with other contents and matching hashes."""

    def make(contents: dict[str, bytes] | None = None, **changes: object) -> Path:
        import shutil

        made = tmp_path / "foreign.infer"
        shutil.rmtree(made, ignore_errors=True)
        shutil.copytree(original, made)
        said = json.loads((made / "manifest.json").read_bytes()) | changes
        for name, data in (contents or {}).items():
            (made / name).write_bytes(data)
            said["files"][name], said["lengths"][name] = hashlib.sha256(data).hexdigest(), len(data)
        (made / "manifest.json").write_text(json.dumps(said))
        return made

    return make


def empty_safetensors() -> bytes:
    return struct.pack("<Q", 2) + b"{}"


@pytest.mark.parametrize(
    ("contents", "sentence"),
    [
        ({"compiled/model.onnx": b"\x08\x07\xff\xff"}, "can't open it"),
        ({"compiled/model.onnx": b"junk that is no protobuf"}, "can't open it"),
        ({"compiled/model.onnx": b""}, "ONNX Runtime refuses|can't open it"),
        ({"graph.json": b"{"}, "the graph's signature can't be read"),
        ({"graph.json": b"[" * 5000}, "signature can't be read|can't open it"),
        ({"golden/outputs.safetensors": b"x"}, "golden tensors can't be read"),
        ({"golden/outputs.safetensors": empty_safetensors()}, "expected golden tensors output, got none"),
        ({"golden/inputs.safetensors": empty_safetensors()}, "expected golden tensors input, got none"),
        ({"golden/inputs.safetensors": b"\xff" * 40}, "golden tensors can't be read"),
    ],
)
def test_a_corrupt_file_with_a_valid_hash_exits_with_3(
    foreign: Callable[..., Path], contents: dict[str, bytes], sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    made = foreign(contents)
    with pytest.raises(ArtifactError, match=sentence):
        Predictor.load(made)
    assert main(["verify", str(made)]) == 3
    said = capfd.readouterr()
    assert "EP Error" not in said.out + said.err
    assert len(said.err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"backend": "eager"},
        {"backend": "inductor"},
        {"backend": "os"},
        {"backend": "../x"},
        {"device": "cuda:x"},
        {"name": "a/b"},
        {"sizes": {"batch": [2, 1]}},
        {"sizes": {"batch": [1, 1 << 60]}},
        {"inputs": [{"name": "input", "dtype": "load", "shape": ["batch", 64]}]},
        {"inputs": [{"name": "input", "dtype": "float32", "shape": [1 << 40, 1 << 40]}]},
        {"inputs": [{"name": "input", "dtype": "int64", "shape": ["batch", 64]}]},
        {"inputs": []},
        {"meta": {"generation": {"layers": "x"}}},
        {"meta": {"generation": 3}},
    ],
)
def test_a_manifest_with_false_values_exits_with_3(
    foreign: Callable[..., Path], changes: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    made = foreign(**changes)
    assert main(["verify", str(made), "--trust-code"]) == 3
    said = capfd.readouterr().err
    assert said.isprintable() or said.strip().isprintable()
    assert "internal error" not in said


def test_golden_outputs_of_other_names_are_refused(foreign: Callable[..., Path], tmp_path: Path) -> None:
    save_file({"other": torch.zeros(2, 4)}, tmp_path / "o.safetensors")
    made = foreign({"golden/outputs.safetensors": (tmp_path / "o.safetensors").read_bytes()})
    with pytest.raises(ArtifactError, match="expected golden tensors output, got other"):
        Predictor.load(made)


def test_a_batch_beyond_memory_is_not_warmed_up(foreign: Callable[..., Path]) -> None:
    made = foreign(sizes={"batch": [1, 1 << 40]})
    with Predictor.load(made) as predictor:
        predictor.max_batch = 1 << 40
        predictor._seconds = lambda inputs: float(len(inputs["input"]))  # type: ignore[method-assign]
        assert max(work for work, _ in predictor.warmup()) * 4 <= 1 << 30


# What a foreign artifact says is shown, and nothing in it is obeyed.


def test_control_characters_of_an_artifact_never_reach_the_terminal(
    foreign: Callable[..., Path], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r"
    report = json.loads((foreign() / "report.json").read_bytes())
    report |= {"headline": evil + "fine", "command": evil, "name": "<script>alert(1)</script>"}
    made = foreign(
        {"report.json": json.dumps(report).encode(), "report.html": b"<script>alert(1)</script>"},
        made_with=evil,
        verdict=[evil],
    )
    page = tmp_path / "page.html"
    for command in (
        ["inspect"],
        ["verify"],
        ["report"],
        ["report", "--html", str(page)],
        ["report", "--json"],
    ):
        assert main([command[0], str(made), *command[1:]]) == 0
    said = "".join(capfd.readouterr())
    assert not [c for c in said if ord(c) < 32 and c not in "\n\t" or c in "\x7f\u202e"]
    assert "\\x1b" in said
    assert "<script>alert" not in page.read_text()


def test_an_invalid_report_file_is_refused(foreign: Callable[..., Path]) -> None:
    for data in (b"{", b"[]", b'{"findings": [3]}', b'{"findings": {"a": 1}}', b"\xff", b"[" * 10000):
        made = foreign({"report.json": data})
        with pytest.raises(ArtifactError):
            inspection.report(made)
        with pytest.raises(ArtifactError):
            read_report(made)


def test_sizes_of_files_are_in_the_manifest(tmp_path: Path) -> None:
    output = make(tmp_path / "toy.infer")
    assert store.read_manifest(output).lengths == {"weights/a.bin": 7}
    older = json.loads((output / "manifest.json").read_bytes())
    del older["lengths"]
    (output / "manifest.json").write_text(json.dumps(older))
    store.verify(output, store.read_manifest(output))
    assert msgspec.structs.replace(manifest(), lengths={}).lengths == {}


def test_unparsable_text_files_of_a_model_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    template = ChatTemplate.open(tmp_path)
    assert template is not None
    with pytest.raises(ArtifactError, match="can't be read"):
        template.check()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match="no UTF-8 text"):
        ChatTemplate.open(tmp_path)
    for said in ('{"top_k": 0.5}', "[" * 100000, "\xff"):
        (tmp_path / "generation_config.json").write_text(said)
        with pytest.raises(ArtifactError):
            GenerationConfig.open(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ArtifactError, match="tokenizer can't be read"):
        LLMTokenizer(tmp_path / "tokenizer.json")


def test_onnx_runtime_prints_nothing_of_its_own(
    foreign: Callable[..., Path], capfd: pytest.CaptureFixture[str]
) -> None:
    import onnx

    model = onnx.load(foreign() / "compiled/model.onnx", load_external_data=False)
    stored = next(t for t in model.graph.initializer if t.raw_data)
    stored.raw_data = stored.raw_data + b"more"
    made = foreign({"compiled/model.onnx": model.SerializeToString()})
    capfd.readouterr()
    assert main(["verify", str(made)]) == 3
    said = capfd.readouterr()
    assert said.out == ""
    assert len(said.err.splitlines()) == 1
