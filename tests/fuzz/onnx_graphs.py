"""Random ONNX graphs on ort and openvino; `python -m tests.fuzz.onnx_graphs SECONDS [SEED [COUNT]]`.

Each graph that the checker takes is optimized with rows of data; what is published is opened and compared with
onnx.reference, and with onnxruntime without optimizations, outside of the project's own comparison. An *escape* is
published and differs from both: an integer at all, a number by more than `FAR` of its output's, column's or row's size
beyond what rounding of the inputs does there. It is printed with its seed and operators; `SECONDS SEED 1` repeats it
alone. Rows that were not among the data are compared too and counted apart as unseen.

Graphs are skipped, and counted, where the checker or every reference refuses them. A process of its own runs them, so
that a crash is counted, and ends none of the others.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from infer import InferError, Plan, Predictor, optimize
from tests.gate.suite import spare_time
from tests.support import random_onnx_graphs as graphs

BACKENDS = ("ort", "openvino")
ROWS = 24
FAR = 3e-3  # of the size of an output, column or row: three times what the gate allows floats
NUDGES = 6  # inputs nudged by rounding, to see what is not determined by them
PATIENCE = 120.0  # seconds of one graph
Arrays = list[np.ndarray]


class References:
    """The answers of one graph by implementations that share nothing with what is judged."""

    def __init__(self, model: onnx.ModelProto) -> None:
        import onnxruntime
        from onnx.reference import ReferenceEvaluator

        self.runs: list[Any] = []
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        for make in (
            lambda: onnxruntime.InferenceSession(model.SerializeToString(), options),
            lambda: ReferenceEvaluator(model),
        ):
            try:
                self.runs.append(make())
            except Exception:  # noqa: BLE001, S112 - an operator that one of them does not have
                continue

    def answers(self, x: np.ndarray) -> list[Arrays]:
        """Return the outputs of each reference that can run these rows."""
        found = []
        for run in self.runs:
            try:
                with warnings.catch_warnings(), np.errstate(all="ignore"):
                    warnings.simplefilter("ignore")
                    found.append([np.asarray(y) for y in run.run(None, {"x": x})])
            except Exception:  # noqa: BLE001, S112 - what it does not have shows only when it runs
                continue
        return found

    def room(self, x: np.ndarray, answer: Arrays) -> Arrays:
        """Return how far each number moves when the inputs are nudged by their rounding; 0 for whole inputs."""
        moved = [np.zeros(y.shape) for y in answer]
        if x.dtype.kind != "f":
            return moved
        numbers = np.random.default_rng(0)
        for _ in range(NUDGES):
            nudged = x * (1 + numbers.uniform(-1, 1, x.shape) * 1e-6) + numbers.uniform(-1, 1, x.shape) * 1e-7
            for i, other in enumerate(self.answers(nudged.astype(x.dtype))[0]):
                with np.errstate(all="ignore"):
                    moved[i] = np.fmax(
                        moved[i], np.abs(other.astype(np.float64) - answer[i].astype(np.float64))
                    )
        return moved


def differs(want: Arrays, got: Sequence[np.ndarray], room: Arrays) -> str:
    """Return where an answer differs beyond rounding, or an empty string."""
    for index, (w, g, r) in enumerate(zip(want, got, room, strict=True)):
        if w.shape != g.shape or w.dtype != g.dtype:
            return f"output {index}: {g.dtype}{list(g.shape)}, not {w.dtype}{list(w.shape)}"
        if w.dtype.kind != "f":
            wrong = (w != g) & (r == 0)
            if wrong.any():
                place = tuple(int(i) for i in np.argwhere(wrong)[0])
                counts = f"{int(wrong.sum())} of {w.size} differ"
                return f"output {index}: {counts}, first {g[place]}, not {w[place]} at {place}"
            continue
        lost = np.isfinite(w) & ~np.isfinite(g) & (r == 0)
        made = np.isnan(w) & ~np.isnan(g)
        if lost.any() or made.any():
            return f"output {index}: {int(lost.sum())} NaN or infinite, {int(made.sum())} numbers for NaN"
        both = np.isfinite(w) & np.isfinite(g) & np.isfinite(r)
        w64, g64, r64 = (np.where(both, a.astype(np.float64), 0.0) for a in (w, g, r))
        beyond = np.maximum(np.abs(w64 - g64) - 20 * r64, 0.0)
        if (size := _size(w64, beyond)) > FAR:
            place = np.unravel_index(int(beyond.argmax()), beyond.shape)
            return f"output {index}: {size:.3g} off, largest {g64[place]:.6g}, not {w64[place]:.6g}"
    return ""


def _size(want: np.ndarray, beyond: np.ndarray) -> float:
    """Return the largest relative error of the whole, of a row, and of an entry of a small axis."""
    scale = float(np.abs(want).max(initial=0.0))
    if scale == 0:
        return math.inf if beyond.max(initial=0.0) > 1e-30 else 0.0
    want, beyond = want / scale, beyond / scale
    found = 0.0
    for axis in range(want.ndim):
        if axis and want.shape[axis] > 64:
            continue
        others = tuple(i for i in range(want.ndim) if i != axis)
        errors, sizes = np.sqrt(np.square(beyond).sum(others)), np.sqrt(np.square(want).sum(others))
        sizes = np.maximum(sizes, sizes.mean() * 0.1)  # a row of nearly nothing is no measure
        found = max(found, float((errors / np.where(sizes > 0, sizes, 1.0)).max(initial=0.0)))
    return found


def try_seed(seed: int, folder: Path) -> list[dict[str, Any]]:
    """Optimize the graph of a seed on every backend; return how each ended."""
    model = graphs.make(seed)
    ops = " ".join(node.op_type for node in model.graph.node)
    skipped = {"seed": seed, "backend": "", "ops": ops, "result": "skipped"}
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception as error:  # noqa: BLE001 - whatever the checker says
        return [{**skipped, "said": f"not valid: {str(error)[:150]}"}]
    data, unseen = graphs.rows(model, ROWS, seed), graphs.rows(model, ROWS, seed + 1_000_003)
    references = References(model)
    want, again = references.answers(data), references.answers(unseen)
    if not want or len(again) != len(want):
        return [{**skipped, "said": "no reference runs it"}]
    rooms = references.room(data, want[0]), references.room(unseen, again[0])
    onnx.save(model, str(folder / "model.onnx"))
    np.savez(folder / "data.npz", x=data)
    found = []
    for backend in BACKENDS:
        result, said = _one(backend, folder, data, want, rooms[0], unseen, again, rooms[1])
        found.append({**skipped, "backend": backend, "result": result, "said": said})
    return found


def _one(
    backend: str,
    folder: Path,
    data: np.ndarray,
    want: list[Arrays],
    room: Arrays,
    unseen: np.ndarray,
    again: list[Arrays],
    unseen_room: Arrays,
) -> tuple[str, str]:
    plan = Plan(
        source=str(folder / "model.onnx"),
        backend=backend,
        data=str(folder / "data.npz"),
        allow_slower=True,
        batches=(),
        max_batch=32,
    )
    output = folder / f"{backend}.infer"
    shutil.rmtree(output, ignore_errors=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimize(plan, output)
    except InferError as error:
        return ("crashed" if error.exit_code == 1 else "refused"), f"{error.exit_code} {error}"[:400]
    except Exception:  # noqa: BLE001 - a traceback is no refusal
        return "crashed", traceback.format_exc()[-800:]
    try:
        with Predictor.load(output) as predictor:
            names = [spec.name for spec in predictor.outputs]
            whole = _answers(predictor, names, data)
            ones = [_answers(predictor, names, data[i : i + 1]) for i in range(3)]
            rest = _answers(predictor, names, unseen)
    except Exception:  # noqa: BLE001 - published, and does not run
        return "escaped", f"published, and fails: {traceback.format_exc()[-500:]}"
    reasons = [differs(reference, whole, room) for reference in want]
    if not all(reasons):
        firsts = [np.concatenate(parts) for parts in zip(*ones, strict=True)]
        reasons = [differs([y[:3] for y in one], firsts, [r[:3] for r in room]) for one in want]
        reasons = [f"one by one, {reason}" if reason else "" for reason in reasons]
    if all(reasons):
        return "escaped", reasons[0]
    reasons = [differs(reference, rest, unseen_room) for reference in again]
    return ("unseen", reasons[0]) if all(reasons) else ("published", "")


def _answers(predictor: Predictor, names: list[str], x: np.ndarray) -> Arrays:
    given = predictor.predict({"x": x})
    return [np.asarray(given[name]) for name in names]


def work(seed: int, count: int) -> None:
    """Run seeds one after another, a line of JSON for each; the parent reads them."""
    spare_time()
    folder = Path(tempfile.mkdtemp(prefix="infer-fuzz-"))
    try:
        for one in range(seed, seed + count):
            print(json.dumps({"seed": one, "result": "begun"}), flush=True)
            for ending in try_seed(one, folder):
                print(json.dumps(ending), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def endings(seconds: float, seed: int, count: int) -> list[dict[str, Any]]:
    """Run seeds in processes of their own until the time is over."""
    import threading

    found: list[dict[str, Any]] = []
    end, last = time.monotonic() + seconds, seed + count
    while seed < last and time.monotonic() < end:
        command = [sys.executable, "-m", "tests.fuzz.onnx_graphs", "--work", str(seed), str(last - seed)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert child.stdout is not None
        began = [time.monotonic()]
        late = threading.Event()

        def watch(
            child: subprocess.Popen[str] = child, began: list[float] = began, late: threading.Event = late
        ) -> None:
            while child.poll() is None:
                now = time.monotonic()
                if now > end + PATIENCE or now - began[0] > PATIENCE:
                    late.set()
                    child.kill()
                time.sleep(0.5)

        threading.Thread(target=watch, daemon=True).start()
        over = False
        for line in child.stdout:
            if not line.startswith('{"seed"'):
                continue
            ending = json.loads(line)
            if ending["result"] == "begun":
                seed, began[0] = ending["seed"], time.monotonic()
                if over := began[0] > end:
                    break
                continue
            found.append(ending)
            if ending["result"] in ("escaped", "crashed", "unseen"):
                show(ending)
        child.kill() if over else None
        if child.wait() and not over:
            said = (
                f"more than {PATIENCE:g} s" if late.is_set() else f"the process ended with {child.returncode}"
            )
            found.append({"seed": seed, "backend": "", "ops": "", "result": "crashed", "said": said})
            show(found[-1])
        seed += 1
    return found


def show(ending: dict[str, Any]) -> None:
    head = f"{ending['result'].upper()} seed {ending['seed']} {ending['backend']}"
    print(f"{head}: {ending['said']}\n    {ending['ops']}", flush=True)


def main() -> int:
    if sys.argv[1] == "--work":
        work(int(sys.argv[2]), int(sys.argv[3]))
        return 0
    seconds, seed, count = (int(a) for a in (sys.argv[1:] + ["600", "0", "1000000"][len(sys.argv) - 1 :]))
    print(f"seeds from {seed}", flush=True)
    found = endings(seconds, seed, count)
    for backend in (*BACKENDS, ""):
        counts = Counter(ending["result"] for ending in found if ending["backend"] == backend)
        print(f"{backend or 'neither':10}", *(f"{n} {result}," for result, n in counts.most_common()))
    reasons = Counter(
        f"{ending['backend']} {re.sub(r'[0-9][0-9.e+-]*', '#', ending['said'])[:130]}"
        for ending in found
        if ending["result"] in ("refused", "skipped")
    )
    for reason, number in reasons.most_common(30):
        print(f"{number:5}  {reason}")
    tried = len({ending["seed"] for ending in found})
    escapes = sum(ending["result"] in ("escaped", "crashed") for ending in found)
    print(f"{tried} graphs tried, {escapes} escapes")
    return 1 if escapes or not tried else 0


if __name__ == "__main__":
    sys.exit(main())
