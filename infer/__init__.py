"""infer: quantize a trained model, compile it, check it against the original, and serve it.

from infer import Predictor, Plan, optimize
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
__all__ = [
    "AdapterSettings",
    "Budgets",
    "DistilSettings",
    "Finding",
    "InferError",
    "Plan",
    "Predictor",
    "TensorSpec",
    "TrainSettings",
    "__version__",
    "compile",
    "distil",
    "optimize",
    "record",
    "replace",
    "restore",
    "search",
    "train_adapter",
]

# More than `__all__`: what needs packages of extras, as the classes InferModelFor… do, is imported by name alone.
_MODULE_OF = {
    "AdapterSettings": "tune.settings",
    "Budgets": "budgets",
    "DistilSettings": "tune.settings",
    "Finding": "spec",
    "InferError": "errors",
    "Plan": "plan",
    "Predictor": "predict.predictor",
    "TensorSpec": "spec",
    "TrainSettings": "tune.settings",
    "compile": "live.compile",
    "cross_encoder": "predict.sentence_modules",
    "distil": "tune.distillation.distil",
    "optimize": "live.optimize",
    "record": "live.recording",
    "replace": "live.recording",
    "restore": "live.recording",
    "search": "budget_search.run_search",
    "sentence_transformer": "predict.sentence_modules",
    "train_adapter": "tune.adapter",
}


def __getattr__(name: str) -> Any:
    module = "pretrained.classes" if name.startswith("InferModelFor") else _MODULE_OF.get(name)
    if module is not None:
        return getattr(import_module(f".{module}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
