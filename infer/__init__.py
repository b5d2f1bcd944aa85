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
    "distil": "tune.distillation.distil",
    "optimize": "live.optimize",
    "record": "live.recording",
    "replace": "live.recording",
    "restore": "live.recording",
    "search": "budget_search.run_search",
    "train_adapter": "tune.adapter",
}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
