"""Olive on the ONNX graph of the float model, beside the artifact that our search chose: time to answer, error, speed.

AITune is not measured: it needs TensorRT, torch-tensorrt and a GPU.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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
    artifact, graph, folder = (work / f"{name}-{part}" for part in ("float.infer", "onnx", "olive"))
    made = module_command("infer", "optimize", *words, "--backend", "ort", "--quant", "none")
    steps = [
        [*made, "-o", str(artifact), "--force"],
        module_command("infer", "export", str(artifact), "--to", "onnx", "-o", str(graph), "--force"),
    ]
    for command in steps:
        if (done := measured(f"{name}: {command[3]} for Olive", command))["code"]:
            return {"code": done["code"], "said": done["said"]}
    folder.mkdir(exist_ok=True)
    source = next(graph.rglob("*.onnx"))
    script = str(ROOT / "bench/search/olive_search.py")
    ran = measured(f"{name}: Olive", [python, script, str(source), str(folder)])
    result = folder / "result.json"
    if ran["code"] or not result.exists():
        return ran
    found = json.loads(result.read_text())
    return ran | {"tried": found["tried"], **_compared(Path(found["model"]), source, chosen)}


def _compared(theirs: Path, source: Path, chosen: Path) -> dict[str, Any]:
    """Return errors against the float graph, and time of our artifact over that of their model, in turns."""
    import onnxruntime

    inputs = load_file(chosen / "golden" / "inputs.safetensors")
    rows = {key: value[:1] for key, value in inputs.items()}
    expected, model = (onnxruntime.InferenceSession(str(path)) for path in (source, theirs))
    known = expected.run(None, inputs)
    with Predictor.load(chosen) as predictor:
        ours = list(predictor.predict(inputs).values())
        pair = latency.paired(lambda: predictor.predict(rows), lambda: model.run(None, rows))
    return {
        "error": _error(model.run(None, inputs), known),
        "our_error": _error(ours, known),
        "our_time_over_theirs": round(pair.ratio, 3),
        "interval": [round(pair.low, 3), round(pair.high, 3)],
    }


def _error(got: Any, expected: Any) -> float:
    """Return the mean relative error of the outputs."""
    pairs = zip(got, expected, strict=True)
    return statistics.mean(
        float(np.linalg.norm(np.asarray(a) - b) / max(np.linalg.norm(b), 1e-12)) for a, b in pairs
    )
