"""The published file in its own runtime and the artifact, run on the same inputs, judged and timed in turns."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from bench.real import claims
from bench.real.claims import Claim, Timed
from bench.real.published_file import Arrays, PublishedFile, Run, answer
from bench.real.published_files import named
from bench.shared import timing
from bench.shared.timing import Side

THREADS = 2
BATCHES = (1, 8)
ROUNDS, FEW, SLOW = 7, 3, 0.15  # rounds; of calls that take longer than this many seconds, few


class Measured(msgspec.Struct, kw_only=True):
    """Findings of a run of both sides."""

    claims: list[Claim] = []
    original_task: float | None = None
    task: float | None = None
    error: float | None = None  # the largest relative error of an output on real inputs
    real: list[Timed] = []  # at the shapes of our inputs
    why: str = ""  # why nothing was measured, or not all


class Original:
    """A published file in onnxruntime or torch, two threads. `names` are its outputs, `inputs` its inputs, in order.

    `run` is as its users have it, and timed; `exact` judges answers: without the optimizations that may be at fault.
    """

    def __init__(self, entry: PublishedFile) -> None:
        path = entry.file
        if path.suffix == ".onnx":
            self._open_onnx(path)
        else:
            self._open_torch(entry, path)

    def _open_onnx(self, path: Path) -> None:
        import onnxruntime

        levels = onnxruntime.GraphOptimizationLevel
        usual, exact = (
            self._session(path, level) for level in (levels.ORT_ENABLE_ALL, levels.ORT_DISABLE_ALL)
        )
        self.inputs = [one.name for one in usual.get_inputs()]
        self.names = [one.name for one in usual.get_outputs()]
        self.run: Run = lambda given: usual.run(None, dict(given))
        self.exact: Run = lambda given: exact.run(None, dict(given))

    @staticmethod
    def _session(path: Path, level: Any) -> Any:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = THREADS
        options.log_severity_level = 3
        options.graph_optimization_level = level
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def _open_torch(self, entry: PublishedFile, path: Path) -> None:
        if entry.trusts:
            module = torch.jit.load(str(path)).float().eval()
        else:
            from bench.real import model_classes

            module = getattr(model_classes, entry.code[1])()
            held = torch.load(path, map_location="cpu", weights_only=True)
            module.load_state_dict(held.get("model_state", held), strict=False)
            module.eval()
        self.inputs, self.names = [], []

        def run(given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
            with torch.inference_mode():
                found = module(*(torch.from_numpy(value) for value in given.values()))
            return [one.numpy() for one in (found if isinstance(found, tuple | list) else [found])]

        self.run = self.exact = run


class Artifact:
    """An artifact behind `Predictor`, whose inputs and outputs go by the order of the published file's."""

    def __init__(self, folder: Path) -> None:
        from infer import Predictor

        began = time.perf_counter()
        predictor = Predictor.load(folder, threads=THREADS, trust_code=True)
        self.opened = time.perf_counter() - began
        self.inputs = [spec.name for spec in predictor.inputs]
        self.names = [spec.name for spec in predictor.outputs]
        self.predict = predictor.predict

    def run(self, given: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        found = self.predict(renamed(given, self.inputs))
        return [np.asarray(found[name]) for name in self.names]


def renamed(given: Mapping[str, np.ndarray], names: Sequence[str]) -> Arrays:
    """Return inputs by the names of a side: those that are equal as identifiers, else in their order."""
    wanted = {_plain(name): name for name in names}
    if all(_plain(name) in wanted for name in given):
        return {wanted[_plain(name)]: value for name, value in given.items()}
    return dict(zip(names or given, given.values(), strict=False))


def _plain(name: str) -> str:
    return re.sub(r"\W", "_", name)


def measure(name: str, folder: str) -> Measured:
    """Run both sides of a file, by its name in the table; `folder` is the artifact's."""
    torch.set_num_threads(THREADS)
    entry, place = named(name), Path(folder)
    report = json.loads((place / "report.json").read_text())
    found = Measured(claims=claims.size_claims(report, place))
    if entry.examples is None or entry.score is None:
        found.why = "outcome only"
        return found
    original = Original(entry)
    artifact = Artifact(place)
    examples = entry.examples(entry.file.parents[len(Path(entry.path).parts) - 1])
    theirs = [answer(original.exact, one) for one in examples]
    try:
        ours = [answer(artifact.run, one) for one in examples]
    except Exception as error:  # noqa: BLE001 - an artifact that fails on a real input is the finding
        said = " ".join(str(error).split())[:200]
        found.claims.append(Claim("takes real inputs", "yes", f"{type(error).__name__}: {said}", holds=False))
        return found
    scored = list(zip(examples, ours, theirs, strict=True))
    found.task = float(np.mean([entry.score(e, a, b) for e, a, b in scored]))
    found.original_task = float(np.mean([entry.score(e, b, b) for e, _, b in scored]))
    names = artifact.names if not examples[0].steps else [
        name for index, name in enumerate(artifact.names) if index not in examples[0].carry
    ]  # fmt: skip
    flat = {n: (_rows(ours, i), _rows(theirs, i)) for i, n in enumerate(names)}
    found.error = max(claims.relative_error(a, b) for a, b in flat.values())
    ours_by, theirs_by = ({n: pair[side] for n, pair in flat.items()} for side in (0, 1))
    found.claims += claims.fidelity_claims(report["fidelity"], ours_by, theirs_by)
    found.real = in_turns(
        original, artifact, [entry.rows(examples, batch) for batch in BATCHES], found.claims
    )
    as_said = in_turns(original, artifact, [_golden(place, batch) for batch in BATCHES], found.claims)
    found.claims += claims.speed_claims(report["latency"], report["baseline"], as_said)
    return found


def _rows(outputs: Sequence[list[np.ndarray]], index: int) -> np.ndarray:
    """Return an output of all examples together, a row each where they are of different sizes."""
    values = [np.atleast_1d(one[index]) for one in outputs]
    if len({value.shape[1:] for value in values}) == 1:
        return np.concatenate(values)
    return np.concatenate([value.ravel() for value in values])[None]


def _golden(folder: Path, batch: int) -> Arrays | None:
    """Return the artifact's golden inputs cut or repeated to a number of rows, which is what its report timed."""
    from safetensors.numpy import load_file

    kept = folder / "golden" / "inputs.safetensors"
    if not kept.exists():
        return None
    manifest = json.loads((folder / "manifest.json").read_text())
    given, found = load_file(kept), {}
    for spec in manifest["inputs"]:
        value, shape = given[spec["name"]], spec["shape"]
        axis = shape.index("batch") if "batch" in shape else None
        if axis is None:
            if batch > 1:
                return None
            found[spec["name"]] = value
            continue
        found[spec["name"]] = np.ascontiguousarray(np.take(value, np.arange(batch) % value.shape[axis], axis))
    return found


def _nothing() -> torch.Tensor:
    return torch.zeros(1)


def in_turns(
    original: Original, artifact: Artifact, inputs: Sequence[Arrays | None], refused: list[Claim]
) -> list[Timed]:
    """Time both sides in turns at each batch that the original runs; `refused` gets those that the artifact doesn't."""
    found: list[Timed] = []
    for batch, given in zip(BATCHES, inputs, strict=True):
        if given is None:
            continue
        named, given = renamed(given, artifact.inputs), renamed(given, original.inputs)
        began = time.perf_counter()
        try:
            original.run(given)
        except Exception:  # noqa: BLE001 - a batch that the original doesn't take is not asked of the artifact
            continue
        try:
            artifact.run(named)
        except Exception as error:  # noqa: BLE001 - and one that only the artifact doesn't take is the finding
            refused.append(
                Claim(f"takes batch {batch}", "yes", " ".join(str(error).split())[:200], holds=False)
            )
            continue
        rounds = ROUNDS if time.perf_counter() - began < SLOW else FEW
        sides = [
            Side("ours", lambda named=named: artifact.predict(named), _nothing),  # type: ignore[misc]
            Side("original", lambda given=given: original.run(given), _nothing),  # type: ignore[misc]
        ]
        took = timing.turns(sides, rounds)
        ratios = np.array(took["ours"]) / np.array(took["original"])
        low, ratio, high = (float(v) for v in np.quantile(ratios, (0.25, 0.5, 0.75)))
        seconds = timing.medians(took)
        found.append(Timed(batch, seconds["ours"], seconds["original"], ratio, low, high))
    return found


def fresh_process(folder: str) -> tuple[float, float]:
    """Return the peak memory in bytes and the seconds of opening in a process that does nothing else."""
    from safetensors.numpy import load_file

    from infer import Predictor

    torch.set_num_threads(THREADS)
    began = time.perf_counter()
    with Predictor.load(folder, threads=THREADS, trust_code=True) as predictor:
        seconds = time.perf_counter() - began
        rows = load_file(Path(folder) / "golden" / "inputs.safetensors")
        predictor.predict({spec.name: rows[spec.name] for spec in predictor.inputs})
    peak = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    return float(peak[1]) * 1024 if peak else 0.0, seconds
