"""Olive's search of one ONNX model on this CPU: what `bench.search.rivals` runs in Olive's environment.

python bench/search/olive_search.py MODEL.onnx FOLDER
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def main(words: list[str]) -> int:
    """Search, and print the path of the best model with the number of models that were tried, as JSON."""
    from olive import run

    source, folder = (Path(word).absolute() for word in words)
    began = time.monotonic()
    found = run(config(source, folder))
    best = found.get_best_candidate()
    tried = [str(one.model_path) for one in found.get_output_models()]
    result = {"model": str(best.model_path), "tried": len(tried), "seconds": time.monotonic() - began}
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def config(source: Path, folder: Path) -> dict[str, Any]:
    """Return a workflow that searches dynamic int8 and the sessions' settings by latency, as Olive documents it."""
    latency = {"name": "latency", "type": "latency", "sub_types": [{"name": "avg", "priority": 1}]}
    accelerators = [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]
    return {
        "input_model": {"type": "ONNXModel", "model_path": str(source)},
        "systems": {"here": {"type": "LocalSystem", "accelerators": accelerators}},
        "evaluators": {"speed": {"metrics": [latency]}},
        "passes": {
            "quantize": {"type": "OnnxDynamicQuantization"},
            "tune": {"type": "OrtSessionParamsTuning"},
        },
        "search_strategy": {"execution_order": "joint", "sampler": "tpe", "max_samples": 8, "seed": 0},
        "evaluator": "speed",
        "host": "here",
        "target": "here",
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
