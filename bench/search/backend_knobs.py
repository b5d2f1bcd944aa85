"""Settings of OpenVINO and inductor that could be options of their backend files, measured against the defaults.

    python -m bench.search.backend_knobs [--only openvino:minilm,inductor:digits] [--turns 30] [--batches 1,8]

The float model of each source is lowered once by `infer` (OpenVINO: the compiled model is opened with other properties;
inductor: compiled anew with other settings), every form is checked against the default's outputs, and all are called in
turns whose order rotates. Printed are the medians over turns of wall and CPU time, as ratios to the default with the
95 % interval of `infer.latency`: a setting is worth an option where one of them is decided.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from backends.openvino.model import NumericSettings
from bench.search.sources import arguments
from bench.serve.reporting import progress, write_results
from infer import Predictor, cli, latency, plugins
from infer.artifact import golden
from infer.errors import NotUsableError
from infer.graph import storage

DEFAULT = "default"
OPENVINO: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "pinned threads": {"ENABLE_CPU_PINNING": True},
    "no hyper-threading": {"ENABLE_HYPER_THREADING": False},
    "denormals as zero": {"CPU_DENORMALS_OPTIMIZATION": True},
    "two streams": {"NUM_STREAMS": 2, "PERFORMANCE_HINT": "THROUGHPUT"},
    "throughput hint": {"PERFORMANCE_HINT": "THROUGHPUT"},
}
INDUCTOR: dict[str, dict[str, Any]] = {
    DEFAULT: {},
    "parallel from 8192": {"cpp.min_chunk_size": 8192},
    "fast math": {
        "cpp.enable_unsafe_math_opt_flag": True,
        "cpp.enable_floating_point_contract_flag": "fast",
    },
    "256-bit vectors": {"cpp.simdlen": 256},
    "fixed threads": {"cpp.dynamic_threads": False},
    "inlined kernels": {"cpp.force_inline_kernel": True},
}
CALLS = 2e-2  # seconds of calls in a turn
Form = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]


def main() -> int:
    """Measure what was asked for, print the table and write it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    cases = ["openvino:digits", "openvino:minilm", "inductor:digits", "inductor:minilm"]
    parser.add_argument("--only", type=lambda text: text.split(","), default=cases)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 8]
    )
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for case in asked.only:
            backend, _, name = case.partition(":")
            rows += measured(backend, name, Path(folder), asked.batches, asked.turns)
    lines = [
        "| backend, model | batch | setting | wall / default | CPU / default | difference |",
        "|" + "---|" * 6,
    ]
    for row in rows:
        wall, cpu = (f"{r[0]:.3f} ({r[1]:.3f} to {r[2]:.3f})" for r in (row["wall"], row["cpu"]))
        lines.append(
            f"| {row['case']} | {row['batch']} | {row['setting']} | {wall} | {cpu} | {row['difference']:.1e} |"
        )
    write_results("backend-knobs", {"rows": rows}, "\n".join(lines))
    return 0


def measured(backend: str, name: str, folder: Path, batches: list[int], turns: int) -> list[dict[str, Any]]:
    """Return a row for each setting of a backend and batch size."""
    artifact = folder / f"{backend}-{name}.infer"
    progress(f"{backend} {name}: lower")
    words = [
        *arguments(name, folder),
        "--backend",
        backend,
        "--quant",
        "none",
        "-o",
        str(artifact),
    ]
    if cli.main(["optimize", *words, "--force"]):
        raise SystemExit(f"{backend} {name} was refused")
    with Predictor.load(artifact) as predictor:
        inputs, specs = golden.read_inputs(artifact, predictor.inputs), predictor.inputs
    forms = dict(_forms(backend, artifact, folder))
    rows = []
    for batch in batches:
        progress(f"{backend} {name}: batch {batch}")
        given = {spec.name: spec.with_rows(inputs[spec.name], batch) for spec in specs}
        expected = forms[DEFAULT](given)
        wall, cpu = _in_turns(forms, given, turns)
        for setting, form in forms.items():
            got = form(given)
            rows.append(
                {
                    "case": f"{backend}, {name}",
                    "batch": batch,
                    "setting": setting,
                    "wall": _against(wall[setting], wall[DEFAULT]),
                    "cpu": _against(cpu[setting], cpu[DEFAULT]),
                    "difference": max(
                        float((got[n] - e).norm() / e.norm().clamp_min(1e-30)) for n, e in expected.items()
                    ),
                }
            )
    return rows


def _against(own: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return the median ratio of two lists by turn, and its interval."""
    return latency.decide([max(a, 1e-9) / max(b, 1e-9) for a, b in zip(own, other, strict=True)])[:3]


def _in_turns(
    forms: dict[str, Form], inputs: dict[str, torch.Tensor], turns: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return wall and CPU seconds of a call by setting and turn."""
    names = list(forms)
    for form in forms.values():
        latency.warm_up(lambda form=form: form(inputs))  # type: ignore[misc]
    once = latency.measure(lambda: forms[DEFAULT](inputs), min_seconds=0.1).p50
    calls = max(1, round(CALLS / once))
    wall: dict[str, list[float]] = {name: [] for name in names}
    cpu: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(calls):
                forms[name](inputs)
            wall[name].append((time.perf_counter() - began) / calls)
            cpu[name].append((time.process_time() - spent) / calls)
    return wall, cpu


def _forms(backend: str, artifact: Path, folder: Path) -> Iterator[tuple[str, Form]]:
    module = plugins.get("backends", backend)
    if backend == "openvino":
        for name, changes in OPENVINO.items():
            with _properties(changes):
                yield name, module.open(artifact, "cpu").run
        return
    graph, plan = storage.load(artifact), _plan(artifact)
    compiled = torch._inductor.aoti_compile_and_package
    for number, (name, changes) in enumerate(INDUCTOR.items()):
        progress(f"inductor: {name}")

        def changed(*given: Any, inductor_configs: dict[str, Any], **more: Any) -> Any:
            return compiled(*given, inductor_configs={**inductor_configs, **changes}, **more)  # noqa: B023

        place = folder / f"{artifact.stem}-{number}"
        place.mkdir()
        storage.save(graph, place)
        try:
            with mock.patch.object(torch._inductor, "aoti_compile_and_package", changed):
                module.lower(graph, plan, place)
        except NotUsableError as error:
            progress(f"inductor: {name} is left out: {error.message}")
            continue
        yield name, module.open(place, "cpu").run


def _plan(artifact: Path) -> Any:
    from infer.artifact import store

    return store.read_manifest(artifact).plan.with_(device="cpu")


@contextmanager
def _properties(changes: dict[str, Any]) -> Iterator[None]:
    """Open OpenVINO models with other properties."""
    usual = NumericSettings.properties
    with mock.patch.object(NumericSettings, "properties", lambda self: {**usual(self), **changes}):
        yield


if __name__ == "__main__":
    sys.exit(main())
