"""A backend that fails is refused with a sentence, and "auto" goes on to the next; memory and disk are exit code 7."""

from __future__ import annotations

import errno
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infer import Plan, cli, library_errors, plugins
from infer.errors import NotUsableError, ResourceError, SourceError
from infer.run import stages


@pytest.fixture
def linear(tmp_path: Path) -> Plan:
    torch.manual_seed(0)
    torch.save(nn.Sequential(nn.Linear(8, 8), nn.ReLU()), tmp_path / "model.pt")
    torch.save({"input": torch.randn(8, 8)}, tmp_path / "data.pt")
    return Plan(
        source=str(tmp_path / "model.pt"),
        inputs=("input=float32[batch,8]",),
        data=str(tmp_path / "data.pt"),
        trust_code=True,
        batches=(),
    )


def failing(monkeypatch: pytest.MonkeyPatch, name: str, function: str, error: BaseException) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(plugins.get("backends", name), function, fail)


def only(monkeypatch: pytest.MonkeyPatch, *kept: str) -> None:
    for name in set(plugins.names("backends")) - set(kept):
        monkeypatch.setattr(plugins.get("backends", name), "missing", lambda: "not in this test")


@pytest.mark.parametrize("function", ["lower", "open"])
def test_auto_goes_on_to_the_next_backend_after_any_exception(
    linear: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    only(monkeypatch, "eager", "ort")
    failing(monkeypatch, "ort", function, ValueError("Cannot view a tensor\nlong trace"))
    made = stages.optimize(linear, tmp_path / "out")
    refused = next(one for one in made.report.tried if one.outcome == "refused" and one.name == "ort")
    assert "ort could not lower this model: ValueError: Cannot view a tensor." in refused.why
    assert made.report.plan.backend == "eager"


def test_a_failure_is_not_hidden_behind_a_backend_without_the_format(
    linear: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "eager", "ort")
    eager = plugins.get("backends", "eager")
    monkeypatch.setattr(
        eager, "refuses", lambda graph, plan: None if plan.quant == "none" else "none here", raising=False
    )
    failing(monkeypatch, "ort", "lower", ValueError("Cannot view a tensor"))
    torch.save(nn.Sequential(nn.Linear(128, 128)), linear.source)
    torch.save({"input": torch.randn(8, 128)}, str(linear.data))
    plan = linear.with_(quant="int8", inputs=("input=float32[batch,128]",))
    with pytest.raises(NotUsableError, match="ort could not lower this model: ValueError: Cannot view"):
        stages.optimize(plan, tmp_path / "out")


def test_a_failing_requested_backend_exits_with_5_and_a_hint(
    linear: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, "eager", "lower", KeyError("alpha"))
    command = ["optimize", linear.source, "--trust-code", "--backend", "eager", "--data", str(linear.data)]
    code = cli.main([*command, "--input", linear.inputs[0], "-o", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert code == 5
    assert "eager could not lower this model: KeyError: 'alpha'. Try --backend ort" in said
    log = Path(said.split("The traceback is in ")[1].strip())
    assert "in fail" in log.read_text()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.ENOSPC, "No space left on device"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_out_of_memory_and_full_disk_exit_with_7(
    linear: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    for name in ("eager", "ort", "inductor"):
        failing(monkeypatch, name, "lower", error)
    for backend in ("auto", "eager"):
        with pytest.raises(ResourceError):
            stages.optimize(linear.with_(backend=backend), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_when_every_backend_fails_one_cause_is_said_and_each_named(
    linear: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("eager", "ort", "inductor"):
        failing(monkeypatch, name, "lower", TypeError(f"{name} broke"))
    with pytest.raises(NotUsableError, match=r"eager: .*TypeError: eager broke") as caught:
        stages.optimize(linear, tmp_path / "out")
    assert {"inductor", "ort"} <= set(re.findall(r"\w+", str(caught.value)))


class Lookup(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(10, 64), nn.Linear(64, 64)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


@pytest.mark.parametrize(
    "asked",
    [
        {"quant": "none"},
        {"quant": "int8", "allow_slower": False, "batches": (1, 16)},
        {"quant": "int8:static"},
        {"quant": "none", "bits": 5.0},
    ],
    ids=["compared", "timed", "calibrated", "budgeted"],
)
def test_data_the_float_model_fails_on_exits_with_3(tmp_path: Path, asked: dict[str, Any]) -> None:
    ids = torch.arange(80).reshape(16, 5) % 10
    ids[8:, 3] = 40  # rows that no example of the capture holds
    torch.save(Lookup(), tmp_path / "model.pt")
    torch.save({"ids": ids}, tmp_path / "data.pt")
    plan = Plan(
        source=str(tmp_path / "model.pt"),
        inputs=("ids=int64[batch,5]",),
        data=str(tmp_path / "data.pt"),
        trust_code=True,
        backend="eager",
        **{"batches": (), "allow_slower": True, **asked},
    )
    with pytest.raises(SourceError, match=r"float model itself fails on its inputs.*: IndexError: index out"):
        stages.optimize(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_only_the_most_recent_failure_logs_are_kept() -> None:
    paths = [library_errors.log("eager", ValueError(str(i))) for i in range(library_errors.KEPT + 3)]
    assert sum(path.exists() for path in paths) == library_errors.KEPT
    assert paths[-1].exists()
