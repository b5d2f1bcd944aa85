"""The models of models/ as sources of `infer optimize`: the plan of each, and artifacts of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.shared.repository import MODELS
from bench.shared.results import progress

if TYPE_CHECKING:
    from infer import Plan

NAMES = ("digits", "minilm", "pydoc_lm")


def plan(name: str, **options: Any) -> Plan:
    """Return the plan of digits, minilm (whose sentences are its data) or pydoc_lm."""
    import minilm
    from infer import Plan

    given: dict[str, Any] = {"source": str(MODELS / name)}
    if name == "digits":
        given = {"source": str(MODELS / "digits.pt"), "model": f"{MODELS / 'digits.py'}:build"}
    elif name == "minilm":
        given = {"source": str(minilm.checkpoint_folder()), "data": f"{MODELS / 'minilm.py'}:sentences"}
    return Plan(**given | options)


def artifact(name: str, folder: str | Path, **options: Any) -> str:
    """Optimize a model into `folder` whatever its speed; return the path."""
    from infer import optimize

    progress(f"making the {name} artifact")
    return str(optimize(plan(name, allow_slower=True, **options), Path(folder) / f"{name}.infer").path)
