"""Olive on the ONNX graph of the float model, beside the artifact that our search chose: time to answer, error, speed.

AITune is not measured: it needs TensorRT, torch-tensorrt and a GPU.
"""

from __future__ import annotations

import json
import shutil
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from bench.shared.repository import ROOT, module_command
from infer import Predictor, latency

Measure = Callable[[str, list[str]], dict[str, Any]]


def olive(
    name: str, words: list[str], chosen: Path, python: str, work: Path, measured: Measure
) -> dict[str, Any]:
    """Search with Olive, in its own environment; compare what it chose with the artifact `chosen`.

    `words` are source and data as `infer optimize` takes them, from which the ONNX graph is made first.
    """
    source, failed = float_graph(name, words, work, measured)
    if source is None:
        return failed
    ran, found = searched(name, source, python, work, measured)
    if found is None:
        return ran
    settings = {name: value for name, value in found["settings"].items() if value is not None}
    compared = _compared(Path(found["model"]), settings, source, chosen)
    return ran | {"tried": found["tried"], "settings": settings, **compared}


def float_graph(
    name: str, words: list[str], work: Path, measured: Measure
) -> tuple[Path | None, dict[str, Any]]:
    """Write the float model as ONNX; return its path, or None with what the command that failed said."""
    artifact, graph = work / f"{name}-float.infer", work / f"{name}-onnx"
    made = module_command("infer", "optimize", *words, "--backend", "ort", "--quant", "none")
    steps = [
        [*made, "-o", str(artifact), "--force"],
        module_command("infer", "export", str(artifact), "--to", "onnx", "-o", str(graph), "--force"),
    ]
    for command in steps:
        if (done := measured(f"{name}: {command[3]} for Olive", command))["code"]:
            return None, {"code": done["code"], "said": done["said"]}
    return next(graph.rglob("*.onnx")), {}


def searched(
    name: str, source: Path, python: str, work: Path, measured: Measure, *fault: str
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """Search with Olive; return how the process ended, and its result: None where there is none."""
    folder = work / "-".join((name, "olive", *fault))
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    script = str(ROOT / "bench/search/olive_search.py")
    ran = measured(f"{name}: Olive {' '.join(fault)}", [python, script, str(source), str(folder), *fault])
    result = folder / "result.json"
    return ran, json.loads(result.read_text()) if not ran["code"] and result.exists() else None


def error_of(model: Path, source: Path, inputs: dict[str, Any]) -> float:
    """Return the mean relative error of an ONNX model's outputs against those of another."""
    import onnxruntime

    got, known = (onnxruntime.InferenceSession(str(path)).run(None, inputs) for path in (model, source))
    return _error(got, known)


def _compared(theirs: Path, settings: dict[str, Any], source: Path, chosen: Path) -> dict[str, Any]:
    """Return errors against the float graph, and times of our artifact over those of their model, in turns.

    Their model runs in a session with the settings that Olive found, called by ONNX Runtime's own API; ours is called
    through the checks of `Predictor.predict`, and without them (`our_graph_over_theirs`).
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    for name, value in settings.items():
        if name == "graph_optimization_level":
            value = onnxruntime.GraphOptimizationLevel(value)
        elif name == "execution_mode":
            value = onnxruntime.ExecutionMode(value)
        if name == "extra_session_config":
            for key, text in value.items():
                options.add_session_config_entry(key, str(text))
        else:
            setattr(options, name, value)
    inputs = load_file(chosen / "golden" / "inputs.safetensors")
    rows = {key: value[:1] for key, value in inputs.items()}
    expected, model = (
        onnxruntime.InferenceSession(str(source)),
        onnxruntime.InferenceSession(str(theirs), options),
    )
    known = expected.run(None, inputs)
    with Predictor.load(chosen) as predictor:
        ours = list(predictor.predict(inputs).values())
        pair = latency.paired(lambda: predictor.predict(rows), lambda: model.run(None, rows))
        tensors, runner = {key: torch.from_numpy(value) for key, value in rows.items()}, predictor._runner
        arrays = getattr(runner, "run_arrays", None)
        call = (lambda: runner.run(tensors)) if arrays is None else (lambda: arrays(rows))
        graph = latency.paired(call, lambda: model.run(None, rows))
    return {
        "error": _error(model.run(None, inputs), known),
        "our_error": _error(ours, known),
        "our_time_over_theirs": round(pair.ratio, 3),
        "interval": [round(pair.low, 3), round(pair.high, 3)],
        "our_graph_over_theirs": round(graph.ratio, 3),
    }


def _error(got: Any, expected: Any) -> float:
    """Return the mean relative error of the outputs."""
    pairs = zip(got, expected, strict=True)
    return statistics.mean(
        float(np.linalg.norm(np.asarray(a) - b) / max(np.linalg.norm(b), 1e-12)) for a, b in pairs
    )
