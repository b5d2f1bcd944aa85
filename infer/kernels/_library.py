"""How an operator comes into the namespace `infer`: schema, slow reference, shape function, decomposition.

The reference is registered as CompositeExplicitAutograd, so that it runs on every device until a native
kernel is registered for one (`library().impl(name, kernel, "CPU")`), which then wins there. There are no
gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

NAMESPACE = "infer"
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")  # lives as long as the process
_DECOMPOSITIONS: dict[str, Callable[..., Any]] = {}


def library() -> torch.library.Library:
    """Where native kernels are registered."""
    return _LIBRARY


def define(
    schema: str,
    reference: Callable[..., Any],
    shape: Callable[..., Any],
    decomposition: Callable[..., Any] | None = None,
) -> None:
    """Register `infer::<schema>` once. `decomposition` is plain exportable torch (default: the reference)."""
    name = schema.partition("(")[0]
    if name in _DECOMPOSITIONS:
        return
    _DECOMPOSITIONS[name] = decomposition or reference
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_LIBRARY)


def names() -> list[str]:
    """Every operator of the namespace, in order of definition."""
    return list(_DECOMPOSITIONS)


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """A table for `ExportedProgram.run_decompositions`: every `infer::` operator as plain aten operators."""
    namespace = getattr(torch.ops, NAMESPACE)
    return {getattr(namespace, name).default: function for name, function in _DECOMPOSITIONS.items()}
