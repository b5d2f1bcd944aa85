"""The part of a call that compilation does not change, and backends that are not lowered for it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from backends import inductor
from infer.graph.program import TorchGraph
from infer.plan import Plan
from infer.reporter import Reporter
from infer.results import Metric
from infer.run import compilation_bounds, trial_timing
from infer.run import try_backends as backends
from infer.run.compilation_bounds import CompilationBound
from infer.run.float_reference import FloatReferences
from infer.run.trial import Trial
from infer.run.try_backends import Compressed, Trials
from tests.support.onnx_models import Int8Conv

PROGRAM: Any = object()

AUTO = Plan(source="x", backend="auto", quant="int8", dtype="float32", device="cpu", batches=(1, 8))


def bound_of(module: nn.Module, *shape: int) -> CompilationBound:
    x = torch.randn(shape)
    with torch.no_grad():
        return compilation_bounds.of_call(lambda: module(x))


def test_products_and_convolutions_count_and_what_is_fused_does_not() -> None:
    for module, shape in ((nn.Linear(64, 64), (8, 64)), (nn.Conv2d(3, 8, 3), (1, 3, 32, 32))):
        found = bound_of(module.eval(), *shape)
        assert found.seconds > 0
        assert found.share > 0
    assert bound_of(nn.Sequential(nn.GELU(), nn.LayerNorm(64)), 8, 64).seconds == 0


def test_the_plain_form_of_a_layer_without_a_kernel_counts() -> None:
    """Inductor compiles an int8 convolution to the float one that its decomposition calls."""
    assert bound_of(Int8Conv(16, 16).eval(), 2, 16, 32, 32).seconds > 0


def test_a_recurrent_layer_counts() -> None:
    weights = [torch.randn(64, 16), torch.randn(64, 16)]
    states = [torch.zeros(1, 2, 16), torch.zeros(1, 2, 16)]
    x = torch.randn(7, 2, 16)

    def call() -> object:
        return torch.ops.infer.recurrent(x, states, weights, "LSTM", False, 1, False, False)

    assert compilation_bounds.of_call(call).share > 0


def trial(backend: str, seconds: float, error: float = 0.001) -> Trial:
    made = Trial(backend, Path(), [Metric("y", "relative_error", error)], {}, 1, 1, changed=True)
    made.brief = dict.fromkeys(AUTO.batches, seconds)
    made.runner = SimpleNamespace(run=None)
    return made


def is_bounded(
    monkeypatch: pytest.MonkeyPatch, eager: Trial, *others: Trial, seconds: float = 1.0, share: float = 0.5
) -> tuple[bool, str, list[str]]:
    """Return whether inductor is left out, why, and the backends of the trials afterwards."""
    graph = TorchGraph((), (), {}, program=PROGRAM)
    tried = Trials(AUTO, graph, Compressed(graph, None), Path(), FloatReferences(graph, Path()), Reporter())
    tried.trials += others
    monkeypatch.setattr(Trials, "run", lambda self, name: self.trials.append(eager))
    monkeypatch.setattr(trial_timing, "_unchecked", lambda *_: None)
    monkeypatch.setattr(backends, "Eager", lambda graph: SimpleNamespace(run=None))
    bound = CompilationBound(seconds, share)
    monkeypatch.setattr(trial_timing.compilation_bounds, "of_call", lambda call: bound)
    found = tried.bounded("inductor")
    assert all(one.outcome == "skipped" for one in tried.refused)
    return found, tried.refused[-1].why if tried.refused else "", [one.backend for one in tried.trials]


def test_kernels_that_take_longer_than_another_trial_are_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, why, tried = is_bounded(monkeypatch, trial("eager", 2.0), trial("ort", 0.5))
    assert found
    assert why == "its kernels take 1.00 s alone at batch 8, ort 500 ms in all"
    assert tried == ["ort"], "plain torch calls them too"


def test_a_graph_that_may_win_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_bounded(monkeypatch, trial("eager", 2.0), trial("ort", 1.5)) == (False, "", ["ort", "eager"])


def test_a_graph_that_is_all_kernels_gains_nothing_by_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why, _ = is_bounded(monkeypatch, trial("eager", 1.02), trial("ort", 1.5), share=0.97)
    assert found
    assert "97% of a call of plain torch: compilation gains too little" in why


def test_kernels_that_are_not_faithful_are_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    found, why, _ = is_bounded(monkeypatch, trial("eager", 1.0, error=0.9), trial("ort", 0.5, error=0.9))
    assert found
    assert why.startswith("its kernels in plain torch are not faithful enough: ")


def test_a_named_backend_is_lowered_whatever_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = TorchGraph((), (), {}, program=PROGRAM)
    plan = AUTO.with_(backend="inductor")
    tried = Trials(plan, graph, Compressed(graph, None), Path(), FloatReferences(graph, Path()), Reporter())
    assert not tried.bounded("inductor")


def test_backends_that_compile_are_tried_after_the_others() -> None:
    names = backends.candidates(AUTO)
    assert names[-2:] == ["inductor", "eager"]


def test_what_the_compiler_caches_outlives_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch takes a folder of the temporary files, which are those of one run, for them."""
    from torch._inductor import codecache

    monkeypatch.setenv("INFER_CACHE", str(tmp_path))
    monkeypatch.setenv(inductor.CACHE_VARIABLE, f"{tempfile.gettempdir()}/torchinductor_somebody")
    monkeypatch.setattr(codecache, "_HEADER_DIR", codecache._HEADER_DIR)
    monkeypatch.setattr(codecache, "_HEADER_LOCK_DIR", codecache._HEADER_LOCK_DIR)
    inductor.keep_caches()
    assert Path(codecache._HEADER_DIR).is_relative_to(tmp_path)
    assert codecache.cache_dir() == str(tmp_path / "inductor")
    used = codecache._precompile_header.__wrapped__.__code__.co_names
    assert {"_HEADER_DIR", "_HEADER_LOCK_DIR"} <= set(used), "torch reads them from elsewhere"
    monkeypatch.setenv(inductor.CACHE_VARIABLE, str(tmp_path / "chosen"))
    inductor.keep_caches()
    assert codecache.cache_dir() == str(tmp_path / "chosen")
