"""`infer optimize` of hostile input and on a hostile machine: a sentence, its exit code, and nothing left behind."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from onnx import TensorProto, helper, numpy_helper
from tokenizers import models, normalizers, pre_tokenizers

from infer import paths
from infer.artifact import store
from infer.cli import main
from infer.errors import NotUsableError, ResourceError, SourceError
from infer.library_errors import as_backend_error, as_resource_error, describe
from infer.load.identification.source_names import model_folder
from infer.load.samples.confined_tokenizer import tokens_of
from infer.onnx import ort_session

LONG = "n" * 5000
RANDOM = ["--data", "random", "--batch", "1", "--allow-slower"]


def save_model(path: Path, *, name: str = "w", location: str = "", **fields: str) -> Path:
    """Write y = relu(x @ w), its weight in the external file `location` where one is given."""
    weight = numpy_helper.from_array(np.eye(8, dtype=np.float32), name)
    if location:
        weight.ClearField("raw_data")
        weight.data_location = TensorProto.EXTERNAL
        for key, value in {"location": location, **fields}.items():
            weight.external_data.add(key=key, value=value)
    nodes = [helper.make_node("MatMul", ["x", name], ["m"]), helper.make_node("Relu", ["m"], ["y"])]
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", 8]) for end in ("x", "y")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.write_bytes(model.SerializeToString())
    return path


def run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = main(["optimize", *arguments])
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "internal error" not in said
    return code, said


@pytest.mark.parametrize(
    ("location", "fields", "sentence"),
    [
        ("a\0b.bin", {}, "is missing: 'a\\x00b.bin'"),
        (LONG, {}, "is missing: 'nnn"),
        (
            "data.bin",
            {"offset": "-1", "length": "-1"},
            "expected a number of bytes as the offset of 'w', got '-1'",
        ),
        ("data.bin", {"length": "x"}, "expected a number of bytes as the length of 'w', got 'x'"),
        ("data.bin", {"offset": "128", "length": "256"}, "'w' needs bytes 128 to 384, 'data.bin' has 256"),
        (".", {}, "is not a plain file"),
    ],
)
def test_external_data_that_can_not_be_read_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], location: str, fields: dict[str, str], sentence: str
) -> None:
    (tmp_path / "data.bin").write_bytes(np.eye(8, dtype=np.float32).tobytes())
    source = save_model(tmp_path / "m.onnx", location=location, **fields)
    code, said = run([str(source), *RANDOM, "-o", str(tmp_path / "m.infer")], capsys)
    assert (code, sentence in said) == (3, True), said
    assert len(said) < 600


def test_a_name_of_5000_characters_is_cut_in_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "m.onnx", name=LONG, location=LONG)
    code, said = run([str(source), *RANDOM, "-o", str(tmp_path / "m.infer")], capsys)
    assert (code, "…" in said, len(said) < 600) == (3, True, True)


@pytest.mark.parametrize("name", ["o" * 300, f"{'o' * 300}/a.infer", "a\0b", "a\ud800b"])
def test_an_output_that_no_file_can_have_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    source = save_model(tmp_path / "m.onnx")
    code, _ = run([str(source), *RANDOM, "-o", f"{tmp_path}/{name}"], capsys)
    assert code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


@pytest.mark.parametrize(
    "source",
    ["a\0b.onnx", "a\ud800b.onnx", LONG, f"{LONG}.onnx", "/dev/zero", "pipe.onnx", "ring.onnx", "folder"],
)
def test_a_source_that_is_no_file_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.onnx")
    Path("ring.onnx").symlink_to("ring.onnx")
    Path("folder/config.json").mkdir(parents=True)
    Path("folder/model.safetensors").touch()
    assert run([source, *RANDOM, "-o", "m.infer"], capsys)[0] in (2, 3)


@pytest.mark.parametrize(
    "data", ["a\0b.npz", "a\ud800.npz", f"{LONG}.npz", "/dev/zero", "pipe.npz", "ring.npz"]
)
def test_data_that_is_no_file_is_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe.npz")
    Path("ring.npz").symlink_to("ring.npz")
    source = save_model(tmp_path / "m.onnx")
    assert run([str(source), "--data", data, "-o", "m.infer"], capsys)[0] in (2, 3)


def test_one_array_without_rows_is_not_called_several_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.float32(3))
    code, said = run(
        [str(source), "--data", str(tmp_path / "x.npz"), "-o", str(tmp_path / "m.infer")], capsys
    )
    assert (code, "fit together" in said, "float32 [batch, 8], got float32 []" in said) == (2, False, True), (
        said
    )


def test_a_loop_that_hardly_ends_is_ended_with_the_limit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ort_session, "LONGEST_CALL", 0.5)
    value = helper.make_tensor_value_info("v", TensorProto.FLOAT, ["batch", 8])
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["co"]), helper.make_node("Add", ["v", "v"], ["vo"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("c", TensorProto.BOOL, []),
            value,
        ],
        [
            helper.make_tensor_value_info("co", TensorProto.BOOL, []),
            helper.make_tensor_value_info("vo", TensorProto.FLOAT, ["batch", 8]),
        ],
    )
    ends = [helper.make_tensor_value_info(end, TensorProto.FLOAT, ["batch", 8]) for end in ("x", "y")]
    stored = [numpy_helper.from_array(np.int64(10**12), "n"), numpy_helper.from_array(np.array(True), "go")]
    loop = helper.make_node("Loop", ["n", "go", "x"], ["y"], body=body)
    model = helper.make_model(
        helper.make_graph([loop], "g", ends[:1], ends[1:], stored),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(model, tmp_path / "loop.onnx")
    output = tmp_path / "out" / "m.infer"
    code, said = run([str(tmp_path / "loop.onnx"), *RANDOM, "--backend", "ort", "-o", str(output)], capsys)
    assert (code, "took longer than 0 s and was ended" in said) == (3, True), said
    assert list(output.parent.iterdir()) == []


def growing(path: Path, times: int) -> Path:
    made = tokenizers.Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    made.normalizer = normalizers.Sequence([normalizers.Replace("a", "a" * 1000)] * times)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(path))
    return path


def test_a_tokenizer_that_grows_the_text_is_ended(tmp_path: Path) -> None:
    path = growing(tmp_path / "tokenizer.json", 4)
    with pytest.raises(SourceError, match=r"can't be used, with 2 texts it took more than \d+ MB"):
        tokens_of(path, ["aaa", "b"], 8)


def test_texts_and_pairs_are_tokenized_as_in_this_process(tmp_path: Path) -> None:
    path = growing(tmp_path / "tokenizer.json", 0)
    here = tokenizers.Tokenizer.from_file(str(path))
    here.enable_truncation(2)
    texts = ["a", "a b a", ("a", "b a")]
    wanted = [(one.ids, one.type_ids) for one in here.encode_batch(texts)]
    assert tokens_of(path, texts, 2) == wanted


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        OSError(errno.EFBIG, os.strerror(errno.EFBIG)),
        RuntimeError("I/O error: No space left on device (os error 28)"),
        NotUsableError(
            'ONNX Runtime refuses the model: Failed to write external initializers to file: "w.bin"'
        ),
    ],
)
def test_a_write_that_ended_early_is_a_full_disk(tmp_path: Path, error: Exception) -> None:
    assert isinstance(as_resource_error(error), ResourceError)
    assert as_backend_error("ort", "lower", error, []).exit_code == 7
    with pytest.raises(ResourceError), store.stage(tmp_path / "m.infer", replace=False):
        raise error
    assert list(tmp_path.iterdir()) == []


def test_a_program_on_a_full_disk_is_an_error_not_an_abort(tmp_path: Path) -> None:
    script = f"""
import resource, torch
from pathlib import Path
from infer.graph import capture, storage
from infer.spec import TensorSpec
x = {{"input": torch.zeros(2, 4)}}
graph = capture.capture(torch.nn.Linear(4, 4).eval(), (TensorSpec("input", "float32", ("batch", 4)),), x)
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    storage.save(graph, Path({str(tmp_path)!r}))
except OSError as error:
    print("refused", error.errno)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"refused {errno.EFBIG}\n"), done.stderr


@pytest.mark.parametrize("variable", ["INFER_CACHE", "INFER_CONFIG"])
def test_folders_that_can_not_be_written_are_said_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    source = save_model(tmp_path / "m.onnx")
    monkeypatch.setenv(variable, f"{source}/sub")
    code, said = run([str(source), *RANDOM, "-o", str(tmp_path / "m.infer")], capsys)
    assert (code, "Set INFER_CACHE" in said, "INFER_CONFIG" in said) == (5, True, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]


def test_temporary_files_of_a_run_go_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with paths.temporary_files():
        place = Path(tempfile.mkdtemp())
        assert place.parent.parent == tmp_path
    assert (list(tmp_path.iterdir()), tempfile.gettempdir()) == ([], str(tmp_path))


def test_what_an_interrupted_block_left_is_removed_at_the_end(tmp_path: Path) -> None:
    block = paths.unfinished(tmp_path / "staged")
    (block.__enter__() / "sub").mkdir(parents=True)
    paths.remove_unfinished()
    assert list(tmp_path.iterdir()) == []


SLOW = """
import sys, time, types
from pathlib import Path
from infer.artifact import store
from infer.cli import COMMANDS, main
def staged(output: Path) -> None:
    from infer.paths import temporary_files
    import tempfile
    with store.stage(output, replace=False) as folder, temporary_files():
        Path(tempfile.mkdtemp(), "x").touch()
        (folder / "x").touch()
        print("ready", flush=True)
        time.sleep(60)
COMMANDS["staged"] = "staged"
sys.modules["infer.cli.staged"] = types.SimpleNamespace(staged=staged)
sys.exit(main(["staged", sys.argv[1]]))
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_no_file_and_its_exit_code(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "tmp").mkdir()
    command = [sys.executable, "-c", SLOW, str(tmp_path / "out" / "m.infer")]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(number)
        process.communicate(timeout=60)
    assert process.returncode in (128 + number, -number)
    assert [*(tmp_path / "out").iterdir(), *(tmp_path / "tmp").glob("infer-*")] == []


def test_an_ignored_hangup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    try:
        main(["optimize", "absent.pt"])
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_format_that_no_layer_can_have_is_refused_with_the_layer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = save_model(tmp_path / "m.onnx")
    code, said = run([str(source), *RANDOM, "--quant", "nf4", "-o", str(tmp_path / "m.infer")], capsys)
    assert (code, "no layer of this model can be nf4 (refused w: " in said) == (5, True), said
    assert len(said) < 300


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("it failed:\n  the weight 'a'", "it failed: the weight 'a'"),
        ("it failed:", "it failed"),
        ("word " * 100, "word …"),
        ("w" * 290 + " in: " + "x" * 300, "in…"),
    ],
)
def test_a_cause_ends_with_a_word_and_not_at_a_colon(text: str, shown: str) -> None:
    said = describe(ValueError(text))
    assert said.startswith("ValueError: ")
    assert said.endswith(shown) or said.endswith("word…")
    assert len(said) < 320


def test_a_config_of_another_program_makes_no_hugging_face_folder(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    assert model_folder(weights) is None
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    assert model_folder(weights) == tmp_path
    assert model_folder(tmp_path / "mine.pt") is None, "there are no weights that make it one"
    weights.touch()
    assert model_folder(tmp_path / "mine.pt") == tmp_path


NO_SPACE = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.l = nn.Linear(8, 8)
    def forward(self, input):
        raise {error}
def build():
    return Net()
INPUTS = {{"input": "float32[batch,8]"}}
"""


@pytest.mark.parametrize(
    "error", ["ValueError('no space left in the car park')", "RuntimeError('write failed: no such cell')"]
)
def test_words_of_the_models_own_errors_are_no_full_disk(
    tmp_path: Path, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "net.py").write_text(NO_SPACE.format(error=error))
    torch.save(torch.nn.Linear(8, 8).state_dict(prefix="l."), tmp_path / "net.pt")
    given = [str(tmp_path / "net.pt"), "--model", f"{tmp_path}/net.py:build", "--backend", "eager"]
    code, said = run([*given, "--data", "random", "-o", str(tmp_path / "net.infer")], capsys)
    assert code == 3
    assert error.partition("'")[2].rstrip("')") in said


BATCH_NORM = """
import torch
from torch import nn
def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8, track_running_stats=False))
INPUTS = {"input": "float32[batch,8]"}
"""


def test_a_batch_norm_without_statistics_is_refused_and_its_hint_works(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save(torch.nn.Sequential(torch.nn.Linear(8, 8)).state_dict(), tmp_path / "net.pt")
    (tmp_path / "net.py").write_text(
        BATCH_NORM.replace("track_running_stats", "affine=False, track_running_stats")
    )
    given = [str(tmp_path / "net.pt"), "--model", f"{tmp_path}/net.py:build", "--backend", "eager"]
    given += ["--data", "random", "--allow-slower", "-o", str(tmp_path / "net.infer")]
    code, said = run([*given, "--batch", "1"], capsys)
    assert (code, "the float model itself fails on a batch of 1: ValueError: Expected" in said) == (
        3,
        True,
    ), said
    assert said.endswith("--batch 2")
    assert run([*given, "--batch", "2"], capsys)[0] == 0
