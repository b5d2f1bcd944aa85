"""Server: one port for tensors (KServe v2), OpenAI clients and operators. `infer.serve.run(["model.infer"])`."""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..distribution import install
from ..errors import NotUsableError

if TYPE_CHECKING:
    from .limits import ServeLimits
    from .options import ServeOptions
    from .server import run, start

__all__ = ["ServeLimits", "ServeOptions", "run", "start"]
NEEDS = ("uvicorn", "starlette", "httptools")


def __getattr__(name: str) -> Any:
    if name == "ServeLimits":
        return import_module(".limits", __name__).ServeLimits
    if name == "ServeOptions":
        return import_module(".options", __name__).ServeOptions
    if name in ("run", "start"):
        if missing := [package for package in NEEDS if find_spec(package) is None]:
            raise NotUsableError(f"serving needs {', '.join(missing)}", hint=install("serve"))
        return getattr(import_module(".server", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
