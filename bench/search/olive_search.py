"""Olive's search of one ONNX model on this CPU: what `bench.search.rivals` runs in Olive's environment.

python bench/search/olive_search.py MODEL.onnx FOLDER [crash|wrong]

With a fault the one pass of the workflow is replaced: it crashes, or gives a model with twice the outputs.
"""

from __future__ import annotations

import ctypes
import json
import sys
import time
from pathlib import Path
from typing import Any


def main(words: list[str]) -> int:
    """Search; write the path of the best model, its session settings, and the number of models that were tried."""
    from olive import run

    source, folder = (Path(word).absolute() for word in words[:2])
    asked = config(source, folder)
    if words[2:]:
        plant(words[2])
        asked["passes"].pop("tune")
    began = time.monotonic()
    found = run(asked)
    best = found.get_best_candidate()
    if best is None:
        raise SystemExit("the workflow ended without a model")
    tried = [str(one.model_path) for one in found.get_output_models()]
    settings = best.get_inference_config().get("session_options") or {}
    result = {"model": str(best.model_path), "settings": settings}
    result |= {"tried": len(tried), "seconds": time.monotonic() - began}
    (folder / "result.json").write_text(json.dumps(result))
    return 0


def config(source: Path, folder: Path) -> dict[str, Any]:
    """Return a workflow that searches dynamic int8 and the sessions' settings by latency, as Olive documents it."""
    subs = [{"name": "avg", "priority": 1}]
    latency = {"name": "latency", "type": "latency", "sub_types": subs, "data_config": "rows"}
    rows = {"name": "rows", "type": "DummyDataContainer", "load_dataset_config": one_row(source)}
    accelerators = [{"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}]
    return {
        "input_model": {"type": "ONNXModel", "model_path": str(source)},
        "systems": {"here": {"type": "LocalSystem", "accelerators": accelerators}},
        "data_configs": [rows],
        "evaluators": {"speed": {"metrics": [latency]}},
        "passes": {
            "quantize": {"type": "OnnxDynamicQuantization"},
            "tune": {"type": "OrtSessionParamsTuning", "data_config": "rows"},
        },
        "search_strategy": {"execution_order": "joint", "sampler": "tpe", "max_samples": 8, "seed": 0},
        "evaluator": "speed",
        "host": "here",
        "target": "here",
        "cache_dir": str(folder / "cache"),
        "output_dir": str(folder / "out"),
    }


def one_row(source: Path) -> dict[str, Any]:
    """Return the inputs of a model for one row, symbolic sizes as 1, as Olive's dummy data set takes them."""
    import onnx

    inputs = onnx.load(source, load_external_data=False).graph.input
    types = [onnx.helper.tensor_dtype_to_np_dtype(i.type.tensor_type.elem_type).name for i in inputs]
    shapes = [[size.dim_value or 1 for size in i.type.tensor_type.shape.dim] for i in inputs]
    return {"input_names": [i.name for i in inputs], "input_shapes": shapes, "input_types": types}


def plant(fault: str) -> None:
    """Replace the quantization pass by one that crashes its process or doubles the outputs."""
    from olive.passes.onnx.quantization import OnnxDynamicQuantization

    def crash(self: Any, model: Any, config: Any, output_model_path: str) -> Any:
        ctypes.string_at(0)

    def double(self: Any, model: Any, config: Any, output_model_path: str) -> Any:
        import onnx
        from olive.model import ONNXModelHandler

        made = onnx.load(model.model_path)
        for output in made.graph.output:
            for node in made.graph.node:
                node.output[:] = [f"{n}_half" if n == output.name else n for n in node.output]
                node.input[:] = [f"{n}_half" if n == output.name else n for n in node.input]
            half = f"{output.name}_half"
            made.graph.node.append(onnx.helper.make_node("Add", [half, half], [output.name]))
        path = Path(output_model_path).with_suffix(".onnx")
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(made, path)
        return ONNXModelHandler(str(path))

    OnnxDynamicQuantization._run_for_config = {"crash": crash, "wrong": double}[fault]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
