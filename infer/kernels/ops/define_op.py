"""Definition of operators in the namespace `infer`: schema, slow reference, shape function, decomposition.

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
_SPARSE: list[str] = []
_CALLED: list[str] = []
_NATIVE: list[str] = []
_C_TYPES = {
    "Tensor": "AtenTensorHandle {}",
    "Optional[Tensor]": "AtenTensorHandle* {}",
    "int": "int64_t {}",
    "float": "double {}",
    "bool": "int32_t {}",
    "List[int]": "const int64_t* {}, int64_t {}_size",
    "List[float]": "const double* {}, int64_t {}_size",
    "List[Tensor]": "const AtenTensorHandle* {}, int64_t {}_size",
}


def library() -> torch.library.Library:
    """Return the torch library in which native kernels are registered."""
    return _LIBRARY


def define(
    schema: str,
    reference: Callable[..., Any],
    shape: Callable[..., Any],
    decomposition: Callable[..., Any] | None = None,
    *,
    sparse: bool = False,
    called: bool = False,
) -> None:
    """Register `infer::<schema>` once. `decomposition` is plain exportable torch (default: the reference).

    `sparse`: the decomposition computes much that the operator skips, so that compiled graphs call the operator.
    `called`: every graph calls it, since no graph of plain operators computes it at all sizes.
    """
    name = schema.partition("(")[0]
    if name in _DECOMPOSITIONS or name in _CALLED:
        return
    if called:
        _CALLED.append(name)
    else:
        _DECOMPOSITIONS[name] = decomposition or reference
    if sparse:
        _SPARSE.append(name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_LIBRARY)


def declare(schema: str, shape: Callable[..., Any]) -> None:
    """Register `infer::<schema>` without a reference: the native library brings the only kernel.

    That library also exports `aoti_torch_cpu_<name>`, by the calling convention of compiled graphs.
    """
    name = schema.partition("(")[0]
    _NATIVE.append(name)
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    torch.library.register_fake(f"{NAMESPACE}::{name}", shape, lib=_LIBRARY)


def names() -> list[str]:
    """Every operator that has a decomposition, in order of definition."""
    return list(_DECOMPOSITIONS)


def decompositions(*, sparse: bool = True) -> dict[OpOverload, Callable[..., Any]]:
    """Return a table for `ExportedProgram.run_decompositions`: `infer::` operators as plain aten operators.

    Without `sparse` ones stay calls, which a runtime that can call operators of torch should make.
    """
    namespace = getattr(torch.ops, NAMESPACE)
    kept = () if sparse else _SPARSE
    return {getattr(namespace, name).default: f for name, f in _DECOMPOSITIONS.items() if name not in kept}


def c_functions() -> dict[OpOverload, list[str]]:
    """Return the C declaration of each native operator, for AOTInductor's `custom_ops_to_c_shims`."""
    namespace = getattr(torch.ops, NAMESPACE)
    return {op: [_declaration(op)] for op in (getattr(namespace, name).default for name in _NATIVE)}


def _declaration(op: OpOverload) -> str:
    arguments = [_C_TYPES[str(a.type)].replace("{}", a.name) for a in op._schema.arguments]
    results = [f"AtenTensorHandle* ret{i}" for i in range(len(op._schema.returns))]
    return (
        f"AOTITorchError aoti_torch_cpu_{op._schema.name.split('::')[1]}({', '.join([*arguments, *results])})"
    )
