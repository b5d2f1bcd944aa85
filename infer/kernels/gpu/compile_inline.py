"""Compilers see the Triton kernels of an operator, not the operator: AOTInductor and torch.compile build them in.

`torch.library.triton_op` does this for operators that it defines; ours are defined in `infer.kernels` for all devices,
so the same rule is registered here: while a program is made functional (AOTAutograd), an `infer::` operator on CUDA
tensors is replaced by its function, whose launches `wrap_triton` records. torch.export keeps the operator.

An operator whose number of rows is symbolic stays whole as well: which kernel is best is known when it runs.
AOTInductor then calls it through torch's dispatcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode

from ..ops.define_op import NAMESPACE, library

_EMBEDDED: set[str] = set()


def embed(names: Iterable[str], function: Callable[[str], Callable[..., Any]]) -> None:
    """Register the rule for `infer::<name>`, once; `function(name)` is what takes its place."""
    for name in [name for name in names if name not in _EMBEDDED]:
        _EMBEDDED.add(name)
        torch.library.register_torch_dispatch(
            f"{NAMESPACE}::{name}",
            FunctionalTensorMode,
            functools.partial(_rule, functools.partial(function, name)),
            lib=library(),
        )


def _rule(
    function: Callable[[], Callable[..., Any]],
    mode: Any,
    op: Any,
    types: tuple[type, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
) -> Any:
    from torch.export._trace import custom_triton_ops_decomposition_disabled

    if custom_triton_ops_decomposition_disabled() or not _embeddable(args[0]):
        return mode.__torch_dispatch__(op, types, args, kwargs)
    if any(not issubclass(t, FakeTensor | FunctionalTensor) and t is not Tensor for t in types):
        return NotImplemented
    with mode:
        return function()(*args, **(kwargs or {}))


def _embeddable(x: Tensor) -> bool:
    return x.device.type == "cuda" and all(isinstance(size, int) for size in x.shape)
