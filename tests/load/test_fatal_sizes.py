"""A file on which ONNX Runtime ends its whole process is optimized, and its artifact refuses what would end one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from onnx import parser

from infer import Plan, Predictor, load, optimize
from infer.errors import InputError
from infer.load.samples import fatal_sizes, inputs_of_ours
from infer.load.samples.fatal_sizes import InputTrials
from infer.onnx.trial_process import TrialProcess
from infer.run.float_reference import takes

# Sums of every 160th value from the 400th on. Of fewer values the Scan has no step, and ONNX Runtime divides by zero.
WINDOWS = """<ir_version: 8, opset_import: ["": 17]>
windows (float[N, T] waveforms) => (float[N, K] y) {
  zero = Constant<value = int64[1] {0}>()
  one = Constant<value = int64[1] {1}>()
  first = Constant<value = int64[1] {399}>()
  last = Constant<value = int64[1] {1073741824}>()
  step = Constant<value = int64[1] {160}>()
  ends = Slice(waveforms, first, last, one, step)
  column = Slice(waveforms, zero, one, one)
  begin = Squeeze(column, one)
  rest, y = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
    body = sums (float[N] sum, float[N] next) => (float[N] total, float[N] each) {
      total = Add(sum, next)
      each = Tanh(total)
    }>(begin, ends)
}"""


@pytest.fixture
def windows(tmp_path: Path) -> Path:
    onnx.save(parser.parse_model(WINDOWS), tmp_path / "windows.onnx")
    return tmp_path / "windows.onnx"


def test_sizes_that_end_the_runtime_are_limits_of_the_artifact(windows: Path, tmp_path: Path) -> None:
    report = optimize(Plan(source=str(windows), backend="ort"), tmp_path / "windows.infer").report
    assert any("T from 400" in line for line in report.verdict)
    with Predictor.load(tmp_path / "windows.infer") as predictor:
        assert predictor.predict({"waveforms": np.ones((2, 400), np.float32)})["y"].shape == (2, 1)
        with pytest.raises(InputError, match="expected T of at least 400, got 399"):
            predictor.predict({"waveforms": np.ones((2, 399), np.float32)})


def test_the_process_is_started_again_after_its_death(windows: Path) -> None:
    process = TrialProcess(windows, "onnxruntime", ("y",), 1, 60.0)
    fatal, taken = (process.run({"waveforms": np.ones((3, n), np.float32)}) for n in (64, 560))
    wrong = process.run({"waveforms": np.ones((1, 1, 1), np.float32)})
    process.close()
    assert fatal.failure is not None
    assert process.died_of == [{"waveforms": (3, 64)}]
    assert np.allclose(taken.arrays[0].unpacked(), np.tanh([[2, 3]] * 3))
    assert "rank" in (wrong.failure or "").lower()


def test_of_a_file_that_runs_at_any_size_none_is_limited(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["": 17]> g (float[N, T] sound) => (float[N, T] y) { y = Tanh(sound) }'
    )
    onnx.save(parser.parse_model(text), tmp_path / "m.onnx")
    loaded = load.load(Plan(source=str(tmp_path / "m.onnx")), tried=takes)
    assert "T" not in loaded.sizes


def test_a_bound_is_the_least_size_that_runs(windows: Path) -> None:
    loaded = load.load(Plan(source=str(windows)))
    samples = {"waveforms": torch.ones(2, 1000)}
    trials = InputTrials(
        lambda inputs: {} if inputs["waveforms"].shape[1] >= 523 else None, [{"waveforms": (3, 64)}], print
    )
    assert fatal_sizes.refuse(loaded, samples, trials, inputs_of_ours.some).sizes["T"][0] == 523


def test_no_trial_process_is_left_behind(windows: Path) -> None:
    process = TrialProcess(windows, "onnxruntime", ("y",), 1, 60.0)
    process.run({"waveforms": np.ones((1, 560), np.float32)})
    (child,) = [int(line) for line in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()][
        -1:
    ]
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(child, signal.SIGUSR1)


def test_a_file_that_gives_texts_or_nothing_ends_no_process(tmp_path: Path) -> None:
    """Texts are a failure, no values at all an answer."""
    text = """<ir_version: 8, opset_import: ["": 17]> g (float[N] x) => (float[K] none, string[N] words) {
      words = Cast<to = 8>(x)
      zero = Constant<value = int64[1] {0}>()
      none = Slice(x, zero, zero)
    }"""
    onnx.save(parser.parse_model(text), tmp_path / "texts.onnx")
    onnx.save(parser.parse_model(text.replace(", string[N] words", "")), tmp_path / "none.onnx")
    given = (("texts", ("none", "words"), "expected a tensor of numbers"), ("none", ("none",), None))
    for name, outputs, failure in given:
        process = TrialProcess(tmp_path / f"{name}.onnx", "onnxruntime", outputs, 1, 60.0)
        answer = process.run({"x": np.ones(3, np.float32)})
        process.close()
        assert (answer.failure, process.died_of) == (failure, [])
        assert [array.unpacked().shape for array in answer.arrays] == [(0,)] * (failure is None)
