"""Graph modules of torch.fx whose Python code is generated when it is first used, in the processes of the test suite.

torch.export makes some 30 graph modules for each capture and each opening, and runs few of them; generating and
compiling the code of all took an eighth of the time.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch.fx import graph_module
from torch.fx.graph import _PyTreeCodeGen


class _Forward:
    """`forward` of a class of one graph module: the first access generates the code, which replaces it."""

    def __init__(self, module: graph_module.GraphModule, recompile: Any) -> None:
        self._module, self._recompile = module, recompile

    def __get__(self, instance: Any, owner: type) -> Any:
        self.generate()
        return owner.forward if instance is None else owner.forward.__get__(instance, owner)

    def generate(self) -> Any:
        return self._recompile(self._module)


class _Code:
    """Result of a `recompile` whose code may never be needed."""

    def __init__(self, forward: _Forward) -> None:
        self._forward = forward

    def __getattr__(self, name: str) -> Any:
        return getattr(self._forward.generate(), name)


def generate_code_lazily() -> None:
    """Let `GraphModule.recompile` note that the code is out of date; idempotent."""
    kind = graph_module.GraphModule
    eager = kind.recompile
    if hasattr(eager, "__wrapped__"):
        return

    @wraps(eager)
    def recompile(self: graph_module.GraphModule) -> _Code:
        if isinstance(self._graph._codegen, _PyTreeCodeGen):
            self._in_spec = self._graph._codegen.pytree_info.in_spec
            self._out_spec = self._graph._codegen.pytree_info.out_spec
        type(self).forward = forward = _Forward(self, eager)  # type: ignore[method-assign,assignment]
        self._recompile_submodules()
        return _Code(forward)

    def code(self: graph_module.GraphModule) -> str:
        if isinstance(forward := vars(type(self)).get("forward"), _Forward):
            forward.generate()
        return self._code

    kind.recompile = recompile  # type: ignore[method-assign]
    kind.code = property(code)  # type: ignore[assignment]
