"""The command line as a person meets it: a sentence and an exit code for every way to go wrong, JSON when asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from infer.cli import main, optimize
from infer.errors import UsageError
from infer.plan import Plan

MODELS = Path(__file__).resolve().parents[2] / "models"
DIGITS = [str(MODELS / "digits.pt"), "--model", f"{MODELS / 'digits.py'}:build", "--backend", "eager"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("cli") / "digits.infer"
    assert main(["optimize", *DIGITS, "--batch", "1", "-o", str(output)]) == 0
    return output


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and the sentence; whatever goes wrong, stdout stays empty and no traceback shows."""
    code = main(arguments)
    output = capsys.readouterr()
    assert output.out == ""
    assert "Traceback" not in output.err
    return code, output.err.strip().splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "code", "sentence"),
    [
        (["optimize", "absent.pt"], 3, "absent.pt"),
        (["optimize", "text.pt"], 3, "text"),
        (["optimize", "empty.pt"], 3, "empty"),
        (["optimize", "truncated.pt"], 3, "truncated"),
        (["optimize", "plain.pt"], 2, "--model"),
        (["optimize", "evil.pt"], 3, "--trust-code"),
        (["optimize", "plain.pt", "--backend", "inducter"], 2, "Did you mean inductor?"),
        (["optimize", "plain.pt", "--quant", "int9"], 2, "no quantizer named 'int9'"),
        (["optimize", "plain.pt", "--quant", "cluster:8"], 2, "int8"),
        (["optimize", "plain.pt", "--dtype", "fp12"], 2, "no compute dtype named 'fp12'"),
        (
            ["optimize", "plain.pt", "--dtype", "tf32", "--device", "cpu"],
            5,
            "tf32 is not usable on this machine",
        ),
        (["optimize", "plain.pt", "--device", "tpu"], 2, "no device named 'tpu'"),
        (["optimize", "plain.pt", "--batch", "0"], 2, "expected batch sizes like 1,8"),
        (["optimize", "plain.pt", "--batch", "128"], 2, "larger than --max-batch"),
        (["optimize", "plain.pt", "--plan", "absent.json"], 2, "the plan can't be read"),
        (["optimise", "plain.pt"], 2, "Did you mean 'optimize'?"),
        (
            ["optimize", "plain.pt", "--quantize", "int8"],
            2,
            "no option named '--quantize'. Did you mean --quant?",
        ),
        (
            ["optimize", "plain.pt", "--zzz"],
            2,
            "no option named '--zzz'. infer optimize --help lists the options",
        ),
        (["serve", "x.infer", "--port", "99999"], 2, "'--port'"),
        (["top", "http://127.0.0.1:1"], 5, "Connection refused). Start one: infer serve ARTIFACT"),
        (["optimize", "org/model-7b"], 5, "org/model-7b is not in the cache, and HF_HUB_OFFLINE is set"),
        (["optimize", "model-7b"], 3, "ORG/model-7b, or hf:model-7b"),
        (["optimize", "hf:a b"], 2, "Names are hf:ORG/NAME"),
        (["predict", "absent.infer", "x.npz"], 3, "not an artifact"),
        (["inspect", "absent.pt"], 3, "absent.pt"),
        (["verify", "."], 3, "not an artifact"),
    ],
)
def test_every_usage_error_has_its_message_and_exit_code(
    here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, sentence: str
) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch ran",)

    torch.save({"weight": torch.zeros(4, 4)}, "plain.pt")
    torch.save({"weight": Evil()}, "evil.pt")
    Path("truncated.pt").write_bytes(Path("plain.pt").read_bytes()[:-200])
    Path("text.pt").write_text("hello, this is a text file\n" * 20)
    Path("empty.pt").touch()
    before = sorted(p.name for p in here.iterdir())
    got, said = wrong(arguments, capsys)
    assert (got, sentence in said) == (code, True), said
    assert sorted(p.name for p in here.iterdir()) == before


def test_trt_without_a_device_exits_with_5(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from infer import plugins

    if plugins.why_not("backends", "trt") is None:
        pytest.skip("TensorRT runs here")
    code, said = wrong(["optimize", *DIGITS[:3], "--backend", "trt", "--quant", "int8"], capsys)
    assert code == 5
    assert said.startswith("infer: backend trt is not usable on this machine: ")
    assert said.endswith("Use --backend inductor, or run 'infer doctor'")


def test_wrong_inputs_name_the_tensor(artifact: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez("wrong.npz", image=np.zeros((2, 1, 8, 9), "float32"))
    code, said = wrong(["predict", str(artifact), "wrong.npz"], capsys)
    assert code == 2
    assert "expected input 'image' float32 [batch, 1, 8, 8], got float32 [2, 1, 8, 9]" in said
    np.savez("wrong.npz", image=np.zeros((2, 1, 8, 8), "float64"))
    assert "got float64 [2, 1, 8, 8]" in wrong(["predict", str(artifact), "wrong.npz"], capsys)[1]


@pytest.mark.parametrize("path", ["file.txt/a.infer", "/proc/a.infer"])
def test_an_output_that_can_not_be_written_is_refused(
    artifact: Path, here: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    Path("file.txt").touch()
    np.savez("rows.npz", image=np.zeros((1, 1, 8, 8), "float32"))
    for arguments in (
        ["optimize", *DIGITS, "-o", path],
        ["predict", str(artifact), "rows.npz", "--output", path],
    ):
        code, said = wrong(arguments, capsys)
        assert (code, "the output can't be written: " in said, f" - at {path}" in said) == (2, True, True), (
            said
        )


def test_arrays_of_objects_are_refused_without_advice_to_unpickle(
    artifact: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.savez("objects.npz", image=np.array([{}], dtype=object))
    Path("text.npz").write_text("not an archive")
    for name in ("objects.npz", "text.npz"):
        code, said = wrong(["predict", str(artifact), name], capsys)
        assert (code, "expected arrays of numbers" in said, "pickle" in said) == (2, True, False), said


def test_an_image_for_a_model_of_tensors_is_refused(
    artifact: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("cat.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(64))
    code, said = wrong(["predict", str(artifact), "cat.png"], capsys)
    assert code == 2
    assert "expected tensors (.npz, .npy, .json) or UTF-8 text, got other bytes - at cat.png" in said


def test_predict_refuses_a_folder_as_input(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = wrong(["predict", str(artifact), str(tmp_path)], capsys)
    assert (code, said.startswith(f"infer: expected a file, got the folder {tmp_path}")) == (2, True)


@pytest.mark.parametrize("text", ["word " * 80, "word" * 80, "word" * 80 + ".npz", "a\tb" * 200])
def test_a_text_that_no_file_can_be_named_as_is_an_input(
    text: str, artifact: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = wrong(["predict", str(artifact), text], capsys)
    assert code == 2, said
    assert "internal error" not in said


def test_predict_reads_and_writes_files(
    artifact: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    image = np.random.default_rng(0).random((3, 1, 8, 8), dtype="float32")
    np.savez("x.npz", image=image)
    Path("x.json").write_text(json.dumps({"image": image.tolist()}))
    assert main(["predict", str(artifact), "x.npz"]) == 0
    first = np.array(json.loads(capsys.readouterr().out)["logits"])
    assert main(["predict", str(artifact), "x.json", "--output", "y.npz"]) == 0
    assert first.shape == (3, 10)
    np.testing.assert_allclose(np.load("y.npz")["logits"], first, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("measured_memory")
def test_json_of_every_reading_command(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (
        ["inspect", str(artifact)],
        ["verify", str(artifact)],
        ["report", str(artifact)],
        ["doctor"],
        ["bench", str(artifact), "--batch", "1", "--seconds", "0.05"],
    ):
        assert main([*arguments, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)


def test_inspect_executes_no_code_of_the_model(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.system, ("touch ran",)

    torch.save(Evil(), "evil.pt")
    assert main(["inspect", "evil.pt"]) == 0
    assert "holds code  yes" in capsys.readouterr().out
    assert not Path("ran").exists()


def test_errors_are_printed_as_json_with_json_output(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimize", "absent.pt", "--json"]) == 3
    assert json.loads(capsys.readouterr().out)["error"]["exit_code"] == 3


def test_an_existing_artifact_exits_with_6(artifact: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = wrong(["optimize", *DIGITS, "--output", str(artifact)], capsys)
    assert (code, "--force" in said) == (6, True)


def test_a_plan_from_a_manifest_is_the_same_plan(artifact: Path) -> None:
    stored = json.loads((artifact / "manifest.json").read_text())["plan"]
    plan = optimize.read_plan(artifact / "manifest.json", {"source": stored["source"]})
    assert isinstance(plan, Plan)
    assert plan.backend == "eager"
    with pytest.raises(UsageError, match="the plan can't be read"):
        optimize.read_plan(artifact / "report.html", {"source": "x"})


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_optimize_leaves_no_file(tmp_path: Path, stop: signal.Signals) -> None:
    command = [sys.executable, "-m", "infer", "optimize", *DIGITS, "--output", str(tmp_path / "d.infer")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=MODELS.parent) as process:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not list(tmp_path.glob(".d.infer.tmp-*")):
            time.sleep(0.05)
        process.send_signal(stop)
        _, said = process.communicate(timeout=120)
    # CPython may end itself by the signal after cleaning up; a shell shows 128 + signal for both.
    assert process.returncode in {128 + stop, -stop}
    assert process.returncode != 130 or "interrupted; nothing was published" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.chaos
def test_a_full_disk_exits_with_7_and_leaves_no_file(tmp_path: Path) -> None:
    """A tmpfs of 1 MiB in a mount namespace of its own."""
    script = f"mount -t tmpfs -o size=1m none {tmp_path} && {sys.executable} -m infer optimize " + " ".join(
        [*DIGITS, "--output", str(tmp_path / "d.infer"), "; echo exit $?; ls -A", str(tmp_path)]
    )
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        cwd=MODELS.parent,
        timeout=300,
        check=False,
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip().splitlines()[0]}")
    assert done.stdout.splitlines() == ["exit 7"]
    assert "no space left on the disk" in done.stderr
