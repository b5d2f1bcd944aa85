"""Device queries, on simulated hardware where results depend on it."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

from infer import device, machine
from infer.device import measured_speed, memory, processors
from infer.errors import NotUsableError, UsageError


@pytest.fixture
def cpuinfo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Write a /proc/cpuinfo; what was asked before is forgotten."""

    def write(text: str) -> None:
        path = tmp_path / "cpuinfo"
        path.write_text(text)
        monkeypatch.setattr(machine, "_CPUINFO", path)
        for asked in (device.isa, device.cpu_name, device.why_no_amx):
            asked.cache_clear()

    yield write
    monkeypatch.undo()
    for asked in (device.isa, device.cpu_name, device.why_no_amx):
        asked.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


@pytest.mark.usefixtures("no_gpu")
def test_auto_without_a_gpu_resolves_to_cpu_with_a_reason() -> None:
    choice = device.resolve("auto")
    assert (choice.what, choice.asked, choice.value) == ("device", "auto", "cpu")
    assert choice.reason in ("no CUDA device", "this build of torch is for CPUs only")


@pytest.mark.usefixtures("one_gpu")
def test_auto_with_a_gpu_resolves_to_cuda_and_names_the_gpu() -> None:
    choice = device.resolve("auto")
    assert (choice.value, choice.reason) == ("cuda", "found NVIDIA H200")


@pytest.mark.usefixtures("no_gpu")
def test_cuda_without_a_gpu_is_refused_with_a_hint() -> None:
    with pytest.raises(
        NotUsableError, match=r"device cuda is not usable on this machine: .* Use --device cpu"
    ):
        device.resolve("cuda")


@pytest.mark.usefixtures("one_gpu")
def test_an_absent_gpu_index_is_refused() -> None:
    assert device.resolve("cuda:0").value == "cuda:0"
    with pytest.raises(NotUsableError, match="it has 1 CUDA devices"):
        device.resolve("cuda:1")


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(
        UsageError, match=r"no device named 'cdua'. Known: auto, cpu, cuda. Did you mean cuda\?"
    ):
        device.resolve("cdua")


def test_x86_instruction_sets_are_ordered_by_capability(cpuinfo) -> None:
    cpuinfo(
        "model name\t: Some Xeon\nflags\t\t: fpu avx512_vnni f16c avx2 fma avx512f amx_int8\nflags\t: other\n"
    )
    assert device.isa() == ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "amx_int8")
    assert device.has_vnni()
    assert device.cpu_name() == "Some Xeon"


def test_amx_needs_the_cpu_and_permission_from_linux(cpuinfo, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo("flags : avx2 avx512f avx512_vnni\n")
    assert device.why_no_amx() == "this CPU has no AMX"
    for answer, reason in ((0, None), (-1, "Linux does not grant the tile registers: Success")):
        cpuinfo("flags : avx2 avx512f avx512_vnni amx_int8 amx_bf16 amx_tile\n")
        monkeypatch.setattr(machine.platform, "system", lambda: "Linux")
        libc = types.SimpleNamespace(syscall=lambda *numbers, answer=answer: answer)
        monkeypatch.setattr(machine.ctypes, "CDLL", lambda *_args, libc=libc, **_kwargs: libc)
        monkeypatch.setattr(machine.ctypes, "get_errno", lambda: 0)
        assert device.why_no_amx() == reason


def test_avx_vnni_without_avx512_is_reported_as_vnni(cpuinfo) -> None:
    cpuinfo("flags : avx2 avx_vnni\n")
    assert device.has_vnni()
    assert device.why_slow("int8") is None


def test_arm_instruction_sets_are_named(cpuinfo) -> None:
    cpuinfo("Features\t: fp asimd asimdhp asimddp i8mm bf16 sve\n")
    assert device.isa() == ("neon", "fp16", "dotprod", "i8mm", "bf16", "sve")
    assert not device.has_vnni()
    assert all(device.why_slow(dtype) is None for dtype in ("int8", "float16", "bfloat16"))


def test_without_cpuinfo_the_flags_come_from_torch(
    tmp_path: Path, cpuinfo, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo("")
    monkeypatch.setattr(
        torch.cpu, "get_capabilities", lambda: {"avx2": True, "fma3": True, "f16c": False}, raising=False
    )
    assert device.isa() == ("avx2", "fma")


def test_missing_cpu_features_are_named_for_each_dtype(cpuinfo) -> None:
    cpuinfo("flags : avx2 fma\n")
    assert device.why_slow("float32") is None
    assert device.why_slow(torch.int64) is None
    assert "avx512_fp16" in str(device.why_slow("float16"))
    assert "avx512_bf16" in str(device.why_slow(torch.bfloat16))
    assert "VNNI" in str(device.why_slow("int8"))
    assert "float8" in str(device.why_slow("float8_e4m3fn"))


def test_a_gpu_lacks_features_of_later_architectures(one_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.why_slow("bfloat16", "cuda") is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    said = device.why_slow("bfloat16", "cuda")
    assert said == "compute capability 7.5 has no bfloat16 tensor cores; they came with 8.0"
    assert device.why_slow("float32", "cuda") is None
    assert "8.9" in str(device.why_slow("float8_e4m3fn", "cuda"))


def test_fingerprint_names_arch_isa_and_cpu() -> None:
    marks = device.fingerprint("cpu")
    assert set(marks) == {"arch", "isa", "cpu"}
    assert all(isinstance(value, str) for value in marks.values())


def test_fingerprint_of_a_gpu_adds_name_sm_and_driver(
    one_gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 23\nGCC version: 12.2.0\n"
    )
    monkeypatch.setattr(machine, "_DRIVER", driver)
    marks = device.fingerprint("cuda")
    assert (marks["gpu"], marks["sm"], marks["driver"]) == ("NVIDIA H200", "90", "570.86.15")


def test_versions_hold_only_what_is_installed() -> None:
    found = device.versions()
    assert found["torch"] == torch.__version__
    assert "python" in found
    assert None not in found.values()


def test_device_memory_is_known_and_positive() -> None:
    assert 0 < device.rss() <= device.peak_rss()
    assert device.memory_available("cpu") > 0


def test_a_container_limit_bounds_what_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    free = device.memory_available()
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("400000\n")
    assert device.memory_available() == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert device.memory_available() > 600_000
    assert free > 600_000


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu.max": "max 100000"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ({}, None),
    ],
)
def test_the_quota_of_a_container_is_read(
    files: dict[str, str], cpus: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "_CGROUP", tmp_path)
    (tmp_path / "cpu").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(f"{text}\n")
    assert device.cpu_quota() == cpus


@pytest.mark.parametrize(("cpus", "found"), [(0.5, 1), (1.9, 1), (2.5, 2), (4.0, 4), (None, 4)])
def test_threads_are_no_more_than_the_quota_pays_for(
    cpus: float | None, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processors, "cpu_quota", lambda: cpus)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(4)
        said = device.fit_threads(None)
        assert torch.get_num_threads() == found
        assert (said is None) == (found == 4)
        assert said is None or f"{cpus:g} CPUs, not 4" in said.why
        assert device.fit_threads(3) is None
        assert torch.get_num_threads() == 3
        monkeypatch.setenv("OMP_NUM_THREADS", "3")
        assert device.fit_threads(None) is None
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_reset_peak_works_or_returns_false(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = torch.ones(30_000_000)
    del block
    if device.reset_peak():
        assert device.peak_rss() < device.rss() + 60_000_000
    monkeypatch.setattr(memory, "_CLEAR", tmp_path / "no" / "such")
    assert device.reset_peak() is False


def test_resident_memory_splits_into_anonymous_and_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text("5610-7ff0 ---p [rollup]\nRss:      100 kB\nPss:  40 kB\nAnonymous:   60 kB\n")
    monkeypatch.setattr(memory, "_SMAPS", smaps)
    assert device.resident_split() == (60 * 1024, 40 * 1024)
    monkeypatch.setattr(memory, "_SMAPS", tmp_path / "absent")
    assert device.resident_split() is None


def test_bandwidth_and_peak_are_positive_and_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device.read_bandwidth("cpu") > 1e8
    assert device.peak_flops("cpu", "float32") > 1e7
    assert (
        device.bandwidth_for(1 << 20) == device.bandwidth_for((1 << 20) - 5) >= device.read_bandwidth("cpu")
    )
    assert device.bandwidth_for(1 << 40) == device.read_bandwidth("cpu")
    monkeypatch.setattr(measured_speed, "_best", lambda *_, **__: pytest.fail("measured twice"))
    assert device.read_bandwidth("cpu") == device.read_bandwidth("cpu")
    assert device.peak_flops("cpu", "float32") > 0


@pytest.mark.parametrize(("measured", "low", "high"), [(1e6, 100.0, 1e9), (1e18, 1.0, 1.0)])
def test_other_work_is_seen_in_the_cpu_time_of_a_product(
    monkeypatch: pytest.MonkeyPatch, measured: float, low: float, high: float
) -> None:
    monkeypatch.setattr(measured_speed, "peak_flops", lambda *_: measured)
    threads = torch.get_num_threads()
    assert low <= measured_speed.busy_factor.__wrapped__("cpu") <= high
    assert torch.get_num_threads() == threads
    assert measured_speed.busy_factor.__wrapped__("cuda") == 1.0


def test_integers_have_no_matmul_to_measure() -> None:
    with pytest.raises(NotUsableError, match="no torch.int8 matmul"):
        device.peak_flops("cpu", "int8")


def test_sync_on_a_cpu_does_nothing() -> None:
    device.sync("cpu")


def test_importing_infer_device_queries_no_hardware(run_python) -> None:
    code = (
        "import torch, builtins\n"
        "torch.cuda.is_available = lambda: (_ for _ in ()).throw(AssertionError('asked'))\n"
        "import infer.device\n"
        "print(infer.device.isa.cache_info().currsize)"
    )
    assert run_python(code).strip() == "0"
