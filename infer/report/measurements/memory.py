"""Memory by use: weights by dtype, and the need of a fresh process that opens and runs an artifact.

Measured in a process of its own, because in one that has quantized and compiled the numbers mean nothing.
Unknown is None, never zero.
"""

from __future__ import annotations

import importlib
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import msgspec
import torch
from torch import Tensor

from ... import device as hardware
from ... import rows
from ...artifact import files
from ...graph import encoder_decoder_graphs
from ...library_errors import MOST_SAID
from ...llm.step.step_shape import StepShape
from ...process import child, spawn
from ...process.spawn import describe_exit
from ...sanitize import shortened
from ...spec import Finding
from ...weights.safetensors_file import read_header


def weights(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes by dtype, largest first; a storage that several tensors share counts once."""
    seen: set[int] = set()
    total: Counter[str] = Counter()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[_dtype_name(tensor.dtype)] += storage.nbytes()
    return dict(total.most_common())


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def stored_weights(folder: Path) -> dict[str, int]:
    """Bytes by dtype of an artifact's safetensors, from their headers; empty when the backend holds them."""
    total: Counter[str] = Counter()
    for path in sorted(
        [*folder.glob("weights/*.safetensors"), *folder.glob("encoder/weights/*.safetensors")]
    ):
        for extent in read_header(path)[0].values():
            total[_dtype_name(extent.dtype)] += extent.num_bytes
    return dict(total.most_common())


class Memory(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a fresh process needs to open and run an artifact; None is unknown, and `failure` says why.

    `runtime`: before opening; `opened`, `run`: growth by opening and by a call; `steady`, `peak`: resident in all, the
    self-test among it.
    """

    weights: int | None = None  # None where the backend holds them
    runtime: int | None = None
    opened: int | None = None
    run: int | None = None
    steady: int | None = None
    peak: int | None = None
    gpu_steady: int | None = None
    gpu_peak: int | None = None
    gpu_reserved: int | None = None
    open_seconds: float | None = None
    weights_by_dtype: dict[str, int] = {}
    anonymous: int = 0  # of `steady`; with `file_backed` 0 where the kernel does not tell
    file_backed: int = 0
    batch: int = 0  # rows of the call
    method: str = ""  # how the peak was measured
    failure: str = ""

    def findings(self) -> list[Finding]:
        """List the known memory figures with their meaning, for display."""
        split = f"anonymous {self.anonymous / 1e6:.0f} MB, file-backed {self.file_backed / 1e6:.0f} MB"
        rows = [
            ("weights", self.weights, self._dtypes()),
            ("runtime", self.runtime, "Python and torch, nothing opened"),
            ("opened", self.opened, "weights, compiled code, the backend's libraries"),
            ("run", self.run, f"activations and workspace of {self.batch} rows, at their peak"),
            ("steady", self.steady, split if self.anonymous or self.file_backed else ""),
            ("peak", self.peak, self.failure or self.method),
            ("gpu steady", self.gpu_steady, "allocated before a call"),
            ("gpu peak", self.gpu_peak, "torch.cuda allocator"),
            ("gpu reserved", self.gpu_reserved, "held by the allocator"),
        ]
        shown = [
            Finding("memory", what, value, "B", why)
            for what, value, why in rows
            if value is not None or (what == "peak" and self.failure)
        ]
        if self.open_seconds is not None:
            shown.append(Finding("memory", "open time", self.open_seconds, "s", "in a fresh process"))
        return shown

    def _dtypes(self) -> str:
        return ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in self.weights_by_dtype.items())


SAMPLE = 5e-3  # seconds between two looks where the kernel's own high-water mark can't be reset


class PeakMemory:
    """`with PeakMemory() as m: work()` → `before`, `peak`, `after`: resident bytes of this process, and
    `method`.

    The kernel's high-water mark where it can be reset, else a thread that looks every 5 ms and may miss short
    peaks. On a CUDA device the allocator's own counters, and `reserved` besides.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._cuda = device if device.startswith("cuda") else None
        self.before = self.peak = self.after = 0
        self.reserved: int | None = None
        self.method = ""
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            self.before, self.method = torch.cuda.memory_allocated(self._cuda), "torch.cuda allocator"
            return self
        self.before = hardware.rss()
        self._done = threading.Event()
        if hardware.reset_peak():
            self.method = "high-water mark of the kernel (VmHWM)"
        else:
            self.method = f"sampled every {SAMPLE * 1e3:.0f} ms"
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(SAMPLE):
            self.peak = max(self.peak, hardware.rss())

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            hardware.sync(self._cuda)
            self.after = torch.cuda.memory_allocated(self._cuda)
            self.peak = torch.cuda.max_memory_allocated(self._cuda)
            self.reserved = torch.cuda.max_memory_reserved(self._cuda)
            return
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        else:
            self.peak = hardware.peak_rss()
        self.after = hardware.rss()
        self.peak = max(self.peak, self.before, self.after)

    @property
    def grown(self) -> int:
        """Bytes by which the peak stood above the start."""
        return self.peak - self.before


def probe(
    backend: str,
    folder: Path,
    device: str = "cpu",
    *,
    shape: StepShape | None = None,
    timeout: float = 300.0,
) -> Memory:
    """Measure the memory of opening an artifact and running its golden inputs, in a new process.

    Of a process that fails only the weights are known, and its last words.
    """
    stored = stored_weights(folder)
    weights = Memory(weights=sum(stored.values()) if stored else None, weights_by_dtype=stored)
    arguments = [backend, folder, device, msgspec.json.encode(shape).decode()]
    try:
        done = spawn.run(__name__, arguments, timeout=timeout)
    except TimeoutError:
        return msgspec.structs.replace(weights, failure=f"the probe took longer than {timeout:.0f} s")
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        last = (lines or [describe_exit(done.returncode)])[-1]
        return msgspec.structs.replace(weights, failure=f"the probe failed: {shortened(last, MOST_SAID)}")
    measured = msgspec.json.decode(done.stdout.splitlines()[-1], type=Memory)
    return msgspec.structs.replace(measured, weights=weights.weights, weights_by_dtype=stored)


def import_caller() -> None:
    """Import what a process has imported before it calls `Predictor.load`."""
    importlib.import_module("infer.predict.predictor")


class Imported(msgspec.Struct, frozen=True):
    """Imports that opening an artifact would make, made before: resident bytes before them, and their seconds."""

    before: int
    seconds: float


def import_libraries(backend: str) -> Imported:
    """Import a backend, and what opening its artifacts imports, for many of them; that counts as opening still."""
    from ... import plugins

    import_caller()
    with PeakMemory() as importing:
        start = time.perf_counter()
        module = plugins.get("backends", backend)
        if not module.PORTABLE and not getattr(module, "COMPILES", False):
            importlib.import_module("torch.export.pt2_archive")
        seconds = time.perf_counter() - start
    return Imported(importing.before, seconds)


def measure_opened(
    backend: str, folder: Path, device: str, shape: StepShape | None, imported: Imported | None = None
) -> Memory:
    """Open an artifact in this process, which has opened nothing before, and run its golden inputs.

    `imported`: what this process imported to open it. The seconds are those of `Predictor.load`: hashes, imports, the
    runner, the self-test.
    """
    from safetensors.torch import load_file

    from ... import fidelity, plugins

    import_caller()
    start = time.perf_counter()
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    list(files.hashes(folder, names))  # as opening compares them
    checked = time.perf_counter() - start
    start = time.perf_counter()
    module = plugins.get("backends", backend)
    checked += time.perf_counter() - start
    inputs = load_file(folder / "golden" / "inputs.safetensors")
    with PeakMemory() as opening:
        start = time.perf_counter()
        runner = encoder_decoder_graphs.open_runner(module, folder, device)
        if shape is not None:
            from ...llm.step.encoder_decoder.encoder_decoder_runner import sequence_runner

            runner = sequence_runner(runner, shape, device)
        seconds = time.perf_counter() - start
    runtime = opening.before if imported is None else imported.before
    mapped = hardware.resident_split() or (0, 0)
    with PeakMemory() as running:
        start = time.perf_counter()
        outputs = runner.run(inputs)
        hardware.sync(device)
        checked += time.perf_counter() - start
        for _ in range(2):
            runner.run(inputs)
        hardware.sync(device)
    split = hardware.resident_split() or (0, 0)
    with PeakMemory() as comparing:  # as the self-test does
        start = time.perf_counter()
        fidelity.compare(load_file(folder / "golden" / "outputs.safetensors"), outputs, task="tensors")
        checked += time.perf_counter() - start
    # Mapped weights become resident when a call first touches them; they belong to opening.
    touched = min(max(0, split[1] - mapped[1]), running.grown)
    measured = Memory(
        runtime=runtime,
        opened=max(0, opening.after - runtime + touched),
        run=max(0, running.grown - touched),
        steady=running.after,
        peak=max(opening.peak, running.peak, comparing.peak),
        open_seconds=checked + seconds + (0.0 if imported is None else imported.seconds),
        anonymous=split[0],
        file_backed=split[1],
        batch=rows.count(runner.inputs, inputs),
        method=running.method,
    )
    if device.startswith("cuda"):
        with PeakMemory(device) as on_gpu:
            runner.run(inputs)
        measured = msgspec.structs.replace(
            measured, gpu_steady=on_gpu.before, gpu_peak=on_gpu.peak, gpu_reserved=on_gpu.reserved
        )
    runner.close()
    return measured


def main(parent: str, backend: str, folder: str, device: str, shape: str) -> int:
    """Measure in the new process, and print the result as the last line."""
    child.end_with_parent(int(parent))
    warnings.simplefilter("ignore")
    measured = measure_opened(
        backend, Path(folder), device, msgspec.json.decode(shape, type=StepShape | None)
    )
    print(msgspec.json.encode(measured).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
