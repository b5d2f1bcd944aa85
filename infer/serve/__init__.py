"""`infer.serve.run(["model.infer"])`: one port for tensors (KServe v2), OpenAI clients and operators."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import NotUsableError

if TYPE_CHECKING:
    from .limits import ServeLimits
    from .observing import Observing
    from .server import run

__all__ = ["Observing", "ServeLimits", "run"]
NEEDS = ("uvicorn", "starlette", "httptools")


def __getattr__(name: str) -> Any:
    if name == "ServeLimits":
        return import_module(".limits", __name__).ServeLimits
    if name in ("run", "Observing"):
        if missing := [package for package in NEEDS if find_spec(package) is None]:
            raise NotUsableError(f"serving needs {', '.join(missing)}", hint="pip install 'infer[serve]'")
        return getattr(import_module(".server", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
