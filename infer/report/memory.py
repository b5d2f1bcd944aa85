"""Where the memory goes: weights by dtype, and what a fresh process needs to open and run an artifact.

Measured in a process of its own, because in one that has quantized and compiled the numbers mean nothing.
Unknown is None, never zero.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import msgspec
import torch
from torch import Tensor

from .. import device as hardware
from ..generate import StepShape, Windows
from ..spec import Finding

SAMPLE = 5e-3  # seconds between two looks where the kernel's own high-water mark can't be reset
# The safetensors spelling of a dtype, and ours.
_STORED = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
}
_STORED |= {"I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}
_CHILD = (
    "import json, sys; sys.path[:0] = json.loads(sys.argv[1]); import infer.report.memory as m; m._child()"
)


def weights(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Bytes by dtype, largest first; a storage that several tensors share counts once."""
    seen: set[int] = set()
    total: Counter[str] = Counter()
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total[str(tensor.dtype).removeprefix("torch.")] += storage.nbytes()
    return dict(total.most_common())


def stored_weights(folder: Path) -> dict[str, int]:
    """Bytes by dtype of an artifact's safetensors, from their headers; empty when the backend holds them."""
    total: Counter[str] = Counter()
    for path in sorted((folder / "weights").glob("*.safetensors")):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__":
                start, stop = entry["data_offsets"]
                total[_STORED.get(entry["dtype"], entry["dtype"].lower())] += stop - start
    return dict(total.most_common())


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
        if self.method.startswith("sampled"):
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
) -> list[Finding]:
    """Open the artifact in a fresh process, run its golden inputs, and say what that took.

    In bytes: weights; runtime (before opening), opened and run (growth), steady, peak; on CUDA also gpu
    weights, peak and reserved. A process that fails gives one finding without a value, and its last words.
    """
    stored = stored_weights(folder)
    by_dtype = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in stored.items())
    findings = [Finding("memory", "weights", sum(stored.values()), "B", by_dtype)] if stored else []
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        _CHILD,
        json.dumps(sys.path),
        backend,
        str(folder),
        device,
        msgspec.json.encode(shape).decode(),
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return [
            *findings,
            Finding("memory", "peak", None, "B", f"the probe took longer than {timeout:.0f} s"),
        ]
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [*findings, Finding("memory", "peak", None, "B", f"the probe failed: {last[:300]}")]
    return findings + [Finding("memory", **row) for row in json.loads(done.stdout.splitlines()[-1])]


def _child() -> None:
    """In the fresh process: measure, and print the rows as the last line."""
    from safetensors.torch import load_file

    from .. import plugins

    backend, folder, device = sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    module = plugins.get("backends", backend)
    inputs = load_file(folder / "golden" / "inputs.safetensors")
    with PeakMemory() as opening:
        start = time.perf_counter()
        runner = module.open(folder, device)
        shape = msgspec.json.decode(sys.argv[5], type=StepShape | None)
        runner = runner if shape is None else Windows(runner, shape, device)
        seconds = time.perf_counter() - start
    mapped = hardware.resident_split() or (0, 0)
    with PeakMemory() as running:
        for _ in range(3):
            runner.run(inputs)
        hardware.sync(device)
    split = hardware.resident_split() or (0, 0)
    # Mapped weights become resident when a call first touches them; they belong to opening.
    touched = min(max(0, split[1] - mapped[1]), running.grown)
    why = f"anonymous {split[0] / 1e6:.0f} MB, file-backed {split[1] / 1e6:.0f} MB" if any(split) else ""
    batch = len(next(iter(inputs.values())))
    rows = [
        _row("runtime", opening.before, "Python and torch, nothing opened"),
        _row(
            "opened",
            opening.after - opening.before + touched,
            "weights, compiled code, the backend's libraries",
        ),
        _row("run", running.grown - touched, f"activations and workspace of {batch} rows, at their peak"),
        _row("steady", running.after, why),
        _row("peak", max(opening.peak, running.peak), running.method),
        {"what": "open time", "value": seconds, "unit": "s", "why": "in a fresh process"},
    ]
    if device.startswith("cuda"):
        rows += _cuda_rows(device, runner, inputs)
    runner.close()
    print(json.dumps(rows))


def _cuda_rows(device: str, runner: Any, inputs: dict[str, Tensor]) -> list[dict[str, Any]]:
    with PeakMemory(device) as running:
        runner.run(inputs)
    return [
        _row("gpu steady", running.before, "allocated before a call"),
        _row("gpu peak", running.peak, running.method),
        _row("gpu reserved", running.reserved, "held by the allocator"),
    ]


def _row(what: str, value: int | None, why: str) -> dict[str, Any]:
    return {"what": what, "value": None if value is None else max(0, value), "unit": "B", "why": why}
