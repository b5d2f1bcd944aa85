"""Rivals of the kernel benchmarks in processes of their own: a planted crash is a row, the others are timed."""

from __future__ import annotations

import pytest
import torch

from bench.kernels import linear
from bench.shared import bars, timing
from bench.shared.rivals import Rivals
from bench.shared.timing import Side
from tests.support import planted_engines


def test_crashed_rivals_are_left_out_of_further_rounds() -> None:
    here = Side("ours", lambda: None, lambda: torch.ones(4))
    with Rivals() as rivals:
        for crashes in ("", "made", "check", "later"):
            rivals.start(f"rival {crashes}", planted_engines.sides_of, f"side {crashes}", crashes)
        found = rivals.outputs()
        assert {name: y.tolist() for name, y in found.items()} == {"side ": [1] * 4, "side later": [1] * 4}
        times = rivals.turns([here], rounds=3)
    assert rivals.crashed == dict.fromkeys(["rival made", "rival check", "rival later"], "crashed: signal 11")
    assert {name: len(each) for name, each in times.items()} == {"ours": 3, "side ": 3}
    assert min(times["side "]) >= 0.001 / 3  # of one of three copies, measured there


def test_a_crashed_layer_rival_is_a_table_row(monkeypatch: pytest.MonkeyPatch) -> None:
    case = linear.Case("lut4", 64, 64, 32, {linear.ORT: 1.3, linear.GGML: 1.3})
    monkeypatch.setattr(linear, "_MISSING", {})
    monkeypatch.setattr(linear, "rival_sides", planted_engines.rival_sides)
    monkeypatch.setattr(timing, "TURN", 0.002)
    ort, ggml = linear.measure(case)
    assert ort.got is not None
    assert ggml.got is None
    assert not ggml.is_met
    assert "| crashed: signal 11 | **missed** |" in bars.table([ggml])
