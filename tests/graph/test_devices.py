"""Programs for another device: nothing of the CPU they were captured on is left in the copy. Tried on torch's meta
device, which any build of torch has.
"""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor
from torch import Tensor, nn

from backends import eager, inductor
from infer.errors import NotUsableError
from infer.graph import capture, devices, storage
from infer.graph.program import Graph
from infer.kernels import cpu
from infer.library_errors import quiet
from infer.llm.step.paged_step import capture_step
from infer.llm.step.probe import probe
from infer.plan import Plan
from infer.predict import open_artifact
from infer.results import Lowered
from infer.spec import TensorSpec
from tests.support.program_devices import devices_in
from tests.support.tiny_decoders import build


class Places(nn.Module):
    """Makes tensors, moves them, holds constants and a branch: each names a device when it is captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.offset = torch.arange(4.0)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        y = self.layer(input) + self.offset + torch.ones(4)
        steps = torch.arange(input.shape[1]).to("cpu").float()
        with torch.no_grad():
            return torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,)) + steps + torch.tensor([1.0, 2, 3, 4])


@pytest.fixture(scope="module")
def places() -> Graph:
    specs = (TensorSpec("input", "float32", ("batch", 4)),)
    return capture.capture(Places(), specs, {"input": torch.randn(3, 4)}, sizes={"batch": (1, 8)})


@pytest.fixture(scope="module")
def step() -> Graph:
    """Capture the decode step of a tiny llama, whose rotary embedding is asserted to be on the CPU."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)  # of the exporter
        model = build("llama")
        return capture_step(model, probe(model, page=4, kv_dtype="float32"))


@pytest.mark.parametrize("name", ["places", "step"])
def test_a_program_moved_to_a_gpu_references_no_cpu_tensor(name: str, request: pytest.FixtureRequest) -> None:
    program = request.getfixturevalue(name).exported
    kept = {name: value.data_ptr() for name, value in program.state_dict.items()}
    names = [node.name for node in program.graph.nodes]
    moved = devices.moved(program, "meta")
    assert list(devices_in(moved)) == ["meta"]
    assert [node.name for node in moved.graph.nodes] == names
    with quiet():
        assert list(devices_in(moved.run_decompositions({}))) == ["meta"]
    assert list(devices_in(program)) == ["cpu"], "the original was changed"
    assert kept == {name: value.data_ptr() for name, value in program.state_dict.items()}


def test_a_moved_program_asserts_types_but_no_device(step: Graph) -> None:
    """Tensors are on `cuda:0`, which is not `cuda`: such an assertion would refuse every program."""
    asserted = torch.ops.aten._assert_tensor_metadata.default
    nodes = [node for node in devices.moved(step.exported, "meta").graph.nodes if node.target is asserted]
    assert nodes
    assert all("device" not in node.kwargs and "dtype" in node.kwargs for node in nodes)


def test_a_copy_for_the_same_device_shares_its_weights(places: Graph) -> None:
    moved = devices.moved(places.exported, "cpu")
    weight, own = moved.state_dict["layer.weight"], places.exported.state_dict["layer.weight"]
    assert weight.data_ptr() == own.data_ptr()
    x = torch.randn(2, 4)
    torch.testing.assert_close(moved.module()(input=x), places.exported.module()(input=x))


@pytest.mark.parametrize("name", ["places", "step"])
def test_eager_runs_a_graph_on_the_device_it_is_opened_on(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    storage.save(request.getfixturevalue(name), tmp_path)
    weights = storage.load_weights(tmp_path)
    monkeypatch.setattr(
        storage, "load_weights", lambda folder, device: {n: v.to(device) for n, v in weights.items()}
    )
    opened: list[Graph] = []
    monkeypatch.setattr(eager, "Runner", lambda graph, device: opened.append(graph))
    for device in ("meta", "cpu"):
        eager.open(tmp_path, device)
        assert list(devices_in(opened.pop().exported)) == [device]


def test_inductor_is_given_a_program_of_the_plans_device(
    places: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def compiles(program: Any, *, package_path: io.BytesIO, **_: Any) -> None:
        given.append(program)

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", compiles)
    inductor.lower(places, Plan(source="x", backend="inductor", device="meta"), tmp_path)
    assert list(devices_in(given[0])) == ["meta"]
    assert not (tmp_path / inductor.PACKINGS).exists()


def test_an_artifact_opened_elsewhere_is_lowered_for_that_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFER_CACHE", str(tmp_path / "cache"))
    (tmp_path / storage.PROGRAM).write_bytes(b"")
    plans: list[Plan] = []

    def lower(graph: Graph, plan: Plan, folder: Path) -> Lowered:
        plans.append(plan)
        return Lowered([])

    monkeypatch.setattr(storage, "load", lambda folder: SimpleNamespace(parts={}))
    backend = SimpleNamespace(lower=lower, missing=lambda: None, target=lambda device: {"sm": device})
    manifest: Any = SimpleNamespace(files={}, backend="inductor", plan=Plan(source="x", device="cpu"))
    open_artifact.lower_again(tmp_path, manifest, backend, "cuda:1", ["sm"], True, [])
    assert [plan.device for plan in plans] == ["cuda:1"]


def test_a_compiled_package_opens_without_a_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    (tmp_path / storage.PROGRAM).write_bytes(b"")
    manifest: Any = SimpleNamespace(files={}, backend="inductor", plan=Plan(source="x", device="cpu"))
    assert open_artifact.backend_of(manifest, tmp_path) is inductor
    with pytest.raises(
        NotUsableError, match=r"another machine \(isa\), .*again on this one: no C\+\+ compiler"
    ):
        open_artifact.lower_again(tmp_path, manifest, inductor, "cpu", ["isa"], True, [])


def test_no_cpu_kernels_are_compiled_for_another_device(
    step: Graph, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compiles(*_: object) -> Any:
        raise AssertionError("the C++ kernels were asked for")

    monkeypatch.setattr(cpu, "_LOADED", None)
    monkeypatch.setattr(cpu, "load", compiles)
    found = eager.lower(step, Plan(source="x", backend="eager", device="cuda"), tmp_path).findings
    assert [finding.what for finding in found] == ["operators"]
    assert cpu.watch_fused_programs(on=True) == cpu.FusedProgramTimes(0, 0, 0, 0, 0)


@pytest.mark.parametrize(("device", "index"), [("cuda:1", 1), ("cuda", -1), ("cpu", -1)])
def test_a_package_is_loaded_on_the_gpu_it_is_opened_on(
    device: str, index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[int] = []

    def load(path: str, model: str, single_threaded: bool, runners: int, device_index: int) -> None:
        given.append(device_index)
        raise LookupError

    monkeypatch.setattr(torch._C._aoti, "AOTIModelPackageLoader", load)
    monkeypatch.setattr(storage, "load_signature", lambda folder: SimpleNamespace(inputs=(), outputs=()))
    monkeypatch.setattr(storage, "load_weights", lambda folder, device: {})
    with pytest.raises(LookupError):
        inductor.open(tmp_path, device)
    assert given == [index]
