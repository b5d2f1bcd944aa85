"""Engines of the benchmarks in processes of their own: a crash is in the table, and the others are timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bench.llm import decode_prefill, infer_step, llama_cpp_engine
from bench.llm.decode_prefill import BenchmarkCase
from bench.shared import child_process, timing
from bench.shared.child_process import ChildProcess, EngineCrashed, Seconds
from tests.support import planted_engines

CASE = BenchmarkCase(planted_engines.Shape(), "decode", 128, 1, faster=1.8)


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    made = ChildProcess(planted_engines.Planted)
    yield made
    made.close()


def test_methods_are_called_and_timed_in_the_child(child: ChildProcess) -> None:
    assert child.call("check").tolist() == [1, 1, 1, 1]
    took = child.timed("run")
    assert isinstance(took, Seconds)
    assert took >= 0.001
    assert timing._used_by(child.pid) > 0
    with pytest.raises(RuntimeError, match="ValueError: no such tensor"):
        child.call("fails")
    assert child.call("check").tolist() == [1, 1, 1, 1]  # an exception is not the end


def test_a_crashed_process_reports_its_signal() -> None:
    with pytest.raises(EngineCrashed, match=r"^crashed: signal 11$"):
        ChildProcess(planted_engines.crashes_when_made)
    crashed = ChildProcess(planted_engines.crashes_when_run)
    with pytest.raises(EngineCrashed, match=r"^crashed: signal 11$"):
        crashed.timed("run")
    with pytest.raises(EngineCrashed, match=r"^crashed: signal 11$"):
        crashed.call("check")
    crashed.close()
    with pytest.raises(EngineCrashed, match="ended with exit code 3"):
        child_process.apart(planted_engines.ends)


class Ours:
    pid, num_bytes = None, 1

    def __init__(self, *_: object) -> None:
        pass

    def run(self) -> None:
        time.sleep(0.0005)

    def check(self) -> torch.Tensor:
        return torch.ones(4)

    def close(self) -> None:
        pass


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Replace what takes minutes: our step, llama.cpp, the pass through memory."""
    monkeypatch.setattr(decode_prefill, "InferEngine", Ours)
    monkeypatch.setattr(infer_step, "prepare", lambda shape, head, threads: tmp_path / head)
    monkeypatch.setattr(decode_prefill, "_wrong", lambda *_: "")
    monkeypatch.setattr(decode_prefill.llama_cpp_model, "missing", lambda: None)
    monkeypatch.setattr(llama_cpp_engine, "gguf", lambda *_: tmp_path)
    monkeypatch.setattr(decode_prefill.gguf_writer, "tensor_bytes", lambda path: 1)
    monkeypatch.setattr(timing, "reader", lambda: timing.Side("reading memory", lambda: None, lambda: None))
    return monkeypatch


def test_an_engine_that_crashes_is_a_row_and_the_others_are_timed(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(llama_cpp_engine, "LlamaEngine", planted_engines.engine_of_a_shape)
    (bar,) = decode_prefill.measure(CASE, 0.5)[:1]
    assert bar.details["crashed"] == {"q4_0": "crashed: signal 11", "iq4_nl": "crashed: signal 11"}
    assert set(bar.details["seconds"]) == {
        *infer_step.HEADS,
        "q4_0, flash",
        "iq4_nl, flash",
        "reading memory",
    }
    assert bar.got is not None
    row = decode_prefill.table([bar]).splitlines()[2]
    assert row.count("crashed: signal 11") == 2


def test_if_every_rival_crashes_the_reason_is_reported(planted: pytest.MonkeyPatch) -> None:
    planted.setattr(llama_cpp_engine, "LlamaEngine", planted_engines.crashed_engine)
    (bar,) = decode_prefill.measure(CASE, 0.5)
    assert bar.got is None
    assert "q4_0 crashed: signal 11" in bar.why
    assert not bar.is_met
