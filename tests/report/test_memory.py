"""Memory, ceilings and traces: numbers whose value is known beforehand, and a real probe of a tiny artifact."""

from __future__ import annotations

import gzip
import json
import mmap
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from infer import device as hardware
from infer.errors import UsageError
from infer.graph import capture, storage
from infer.graph.program import TorchGraph
from infer.plan import Plan
from infer.report.measurements import memory, profile, roofline
from infer.report.measurements.forked_memory import ForkingProbe, populate, resident_file_pages
from infer.report.measurements.memory import PeakMemory
from infer.spec import TensorSpec


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def tiny_graph() -> TorchGraph:
    return capture.capture(
        Tiny().eval(), (TensorSpec("x", "float32", ("batch", 16)),), {"x": torch.randn(3, 16)}
    )


def save(graph: TorchGraph, folder: Path) -> None:
    """Write a graph with golden rows, as an artifact has them."""
    storage.save(graph, folder)
    (folder / "golden").mkdir()
    save_file(dict(graph.samples), folder / "golden" / "inputs.safetensors")
    save_file(graph.run(graph.samples), folder / "golden" / "outputs.safetensors")


@pytest.fixture(scope="module")
def tiny_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save(tiny_graph(), folder)
    return folder


def test_weights_are_counted_by_dtype_and_a_shared_storage_once() -> None:
    block = torch.ones(10, 4)
    tensors = [block, block.t(), block[2:], torch.ones(3, dtype=torch.int8)]
    assert memory.weights(tensors) == {"float32": 160, "int8": 3}


def test_stored_weights_come_from_the_headers(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    save_file(
        {"a": torch.ones(5), "b": torch.ones(3, dtype=torch.int8)}, tmp_path / "weights" / "m.safetensors"
    )
    assert memory.stored_weights(tmp_path) == {"float32": 20, "int8": 3}
    assert memory.stored_weights(tmp_path / "none") == {}


@pytest.mark.parametrize("permitted", [True, False])
def test_peak_memory_includes_freed_allocations(permitted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not permitted:
        monkeypatch.setattr(hardware, "reset_peak", lambda: False)
    elif not hardware.reset_peak():
        pytest.skip("the kernel does not let the high-water mark be reset")
    with PeakMemory() as seen:
        block = torch.ones(25_000_000)  # 100 MB
        for _ in range(5):
            block.add_(1)
        del block
    assert seen.grown > 80_000_000
    assert seen.method.startswith("high-water" if permitted else "sampled every 5 ms")


def test_probe_measures_a_fresh_process(tiny_artifact: Path) -> None:
    found = memory.probe("eager", tiny_artifact, "cpu")
    assert found.weights_by_dtype == {"float32": 16 * 4 * 4 + 4 * 4}
    assert found.weights == 16 * 4 * 4 + 4 * 4
    assert all(isinstance(part, int) and part >= 0 for part in (found.runtime, found.opened, found.run))
    assert found.peak >= found.runtime > 10_000_000
    assert found.open_seconds > 0
    assert found.batch == 3
    assert found.failure == ""
    assert [f.what for f in found.findings()][:2] == ["weights", "runtime"]


class Scaled(nn.Module):
    def forward(self, rate: Tensor, x: Tensor) -> Tensor:
        return x * rate


def test_memory_of_a_model_whose_first_input_has_no_axes_is_measured(tmp_path: Path) -> None:
    inputs = (TensorSpec("rate", "float32", ()), TensorSpec("x", "float32", ("batch", 8)))
    samples = {"rate": torch.tensor(2.0), "x": torch.randn(3, 8)}
    save(capture.capture(Scaled(), inputs, samples), tmp_path)
    found = memory.probe("eager", tmp_path)
    assert found.failure == ""
    assert found.batch == 3


class Large(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1 << 20)


def test_the_peak_holds_what_the_self_test_takes(tmp_path: Path) -> None:
    """The self-test compares in double precision: two copies of 32 MB of the outputs, of which a call needs none."""
    graph = capture.capture(
        Large(),
        (TensorSpec("x", "float32", ("batch", 4)),),
        {"x": torch.randn(2, 4)},
        sizes={"batch": (1, 2)},
    )
    save(replace(graph, samples={"x": graph.samples["x"][:1]}), tmp_path)
    found = memory.probe("eager", tmp_path)
    assert found.peak - found.steady > 64 << 20


def test_a_failed_memory_probe_reports_its_last_output(tiny_artifact: Path) -> None:
    found = memory.probe("inducter", tiny_artifact)
    assert found.peak is None
    assert "no backend named 'inducter'" in found.failure
    assert found.findings()[-1].why == found.failure


@pytest.mark.parametrize(
    ("num_bytes", "flops", "seconds", "bound"),
    [(1000, 10, 10.0, "memory"), (100, 10_000, 10.0, "compute"), (100, None, 1.0, "memory")],
)
def test_the_roofline_floor_is_the_larger_of_memory_and_compute(
    num_bytes: int, flops: int | None, seconds: float, bound: str
) -> None:
    assert roofline.least_time(num_bytes, flops, bandwidth=100.0, peak=1000.0) == (seconds, bound)


def test_flops_of_a_linear_are_two_per_multiply_add() -> None:
    linear = nn.Linear(16, 4)
    assert roofline.count_flops(lambda: linear(torch.ones(3, 16))) == 2 * 3 * 16 * 4
    assert roofline.count_flops(lambda: torch.ones(3) + 1) is None


def test_ceiling_names_bytes_bandwidth_peak_and_a_floor_per_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_bandwidth", lambda _: 1e9)
    monkeypatch.setattr(hardware, "bandwidth_for", lambda *_: 1e9)
    monkeypatch.setattr(hardware, "peak_flops", lambda *_: 1e6)
    plan = Plan(source="m", device="cpu", dtype="float32", batches=(1, 8))
    found = roofline.probe(tiny_graph(), 272, plan)
    assert (found.weight_bytes, found.read_bandwidth, found.multiply_peak) == (272, 1e9, 1e6)
    assert found.floor(1).seconds == pytest.approx(128e-6)
    assert found.floor(8).seconds == pytest.approx(8 * 128e-6)
    assert found.floor(8).bound == "compute"
    assert found.floor(3) is None


class EmbeddingAndLinear(nn.Module):
    """A table that is looked up, and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(1000, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(ids))


def test_bytes_read_leave_out_tables_that_are_looked_up() -> None:
    graph = capture.capture(
        EmbeddingAndLinear().eval(),
        (TensorSpec("ids", "int64", ("batch", 3)),),
        {"ids": torch.ones(2, 3, dtype=torch.int64)},
    )
    assert roofline.bytes_read(graph.exported) == 4 * (16 * 4 + 4)


def test_a_model_within_cache_uses_the_cache_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "read_bandwidth", lambda _: 1e9)
    monkeypatch.setattr(hardware, "bandwidth_for", lambda num_bytes, _: 8e9 if num_bytes < 1e6 else 1e9)
    monkeypatch.setattr(hardware, "peak_flops", lambda *_: 1e12)
    plan = Plan(source="m", device="cpu", dtype="float32", batches=(1,))
    (small,), (large,) = (roofline.probe(tiny_graph(), size, plan).floors for size in (800_000, 8_000_000))
    assert (small.seconds, large.seconds) == (pytest.approx(1e-4), pytest.approx(8e-3))
    assert "0.8 MB in cache at 8.0 GB/s" in small.finding().why
    assert (small.in_cache, large.in_cache) == (True, False)


@pytest.mark.parametrize(("vnni", "factor"), [(True, 4.0), (False, 4 / 3)])
def test_int8_products_have_a_higher_peak_than_float(
    vnni: bool, factor: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "peak_flops", lambda *_: 1e9)
    monkeypatch.setattr(hardware, "has_vnni", lambda: vnni)
    monkeypatch.setattr(hardware, "isa", lambda: ())
    plan = Plan(source="m", device="cpu", dtype="float32")
    assert roofline.multiply_peak(plan)[0] == 1e9
    assert roofline.multiply_peak(plan.with_(quant="int8"))[0] == pytest.approx(factor * 1e9)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_a_trace_opens_as_json_and_its_operators_are_ranked(name: str, tmp_path: Path) -> None:
    x = torch.ones(64, 64)
    top = profile.trace(lambda: torch.relu(x @ x), tmp_path / "new" / name, top=3)
    path = tmp_path / "new" / name
    text = gzip.decompress(path.read_bytes()) if name.endswith("gz") else path.read_bytes()
    events = json.loads(text)["traceEvents"]
    assert any(event.get("name") == "aten::mm" for event in events)
    assert len(top) == 3
    assert [op.seconds for op in top] == sorted((op.seconds for op in top), reverse=True)
    assert "aten::mm" in {op.name for op in profile.trace(lambda: x @ x, path)}


def test_a_trace_path_with_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"a trace is a .json or a .json.gz file, got 'x.html'"):
        profile.trace(lambda: None, tmp_path / "x.html")


linux_only = pytest.mark.skipif(sys.platform != "linux", reason="page tables are read from /proc")


@linux_only
def test_a_fork_measures_as_a_fresh_process_and_leaves_none(tiny_artifact: Path) -> None:
    forking = ForkingProbe()
    fresh = memory.probe("eager", tiny_artifact)
    forked = forking.probe("eager", tiny_artifact)
    assert forked.failure == ""
    assert forked.weights == fresh.weights
    again = forking.probe("eager", tiny_artifact)  # in a fork of the process that has the backend's libraries
    for found in (forked, again):
        for name in ("runtime", "opened", "peak", "steady", "anonymous", "file_backed"):
            # How many pages of a library a look maps in depends on what the page cache holds of it.
            close = 0.05 if name == "anonymous" else 0.1
            assert getattr(found, name) == pytest.approx(getattr(fresh, name), rel=close), name
    assert forking._server is not None
    assert os.getsid(forking._server.pid) != os.getsid(0), "an interrupt of the terminal is not for it"
    below = psutil.Process(forking._server.pid).children(recursive=True)
    assert len(below) == 1, "the process of the backend"
    forking.close()
    gone, alive = psutil.wait_procs(below, timeout=30)
    assert not alive


@linux_only
def test_libraries_of_a_backend_are_imported_once_for_all_its_artifacts(
    tiny_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "imports"
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import os, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name in ('torch.export.pt2_archive', 'backends.eager'):\n"
        f"            open({str(log)!r}, 'a').write(name + chr(10))\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    forking = ForkingProbe()
    for _ in range(3):
        assert forking.probe("eager", tiny_artifact).failure == ""
    forking.close()
    assert sorted(log.read_text().split()) == ["backends.eager", "torch.export.pt2_archive"]


@linux_only
def test_a_failed_forked_probe_falls_back_to_a_new_process(
    tiny_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forking = ForkingProbe()
    monkeypatch.setattr(memory, "probe", lambda *args, **more: memory.Memory(failure="fresh"))
    assert forking.probe("inducter", tiny_artifact).failure == "fresh"
    assert forking._server is None


@linux_only
def test_file_pages_of_this_process_are_found_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "pages"
    path.write_bytes(b"x" * 8 * mmap.PAGESIZE)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped[0] == ord("x")
        pages = resident_file_pages()
        assert all(length % mmap.PAGESIZE == 0 and length > 0 for _, length in pages)
        populate(pages)
    with pytest.raises(OSError, match="memory"):
        populate([(mmap.PAGESIZE, mmap.PAGESIZE)])  # not mapped
