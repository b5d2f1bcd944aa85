"""The table of operators of torch's ONNX exporter, built once for each opset in place of once for each export, and
forms of ours for operators that it writes wrongly.

Building it takes 0.4 s of CPU (torch 2.13), four fifths of the export of a single layer.
"""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from typing import Any

_lock = threading.RLock()
_tables: dict[Any, Any] = {}  # by the arguments of `from_torchlib`


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Let exports within this context share the table; of a torch without such a table nothing changes."""
    kind = _registry_class()
    if kind is None:
        yield
        return
    with _lock:
        usual = kind.__dict__["from_torchlib"]

        def shared(cls: Any, *args: Any, **named: Any) -> Any:
            key = (cls, args, tuple(sorted(named.items())))
            if key not in _tables:
                _tables[key] = usual.__get__(None, cls)(*args, **named)
            return _copied(_tables[key])

        kind.from_torchlib = classmethod(shared)
        try:
            yield
        finally:
            kind.from_torchlib = usual


def _registry_class() -> Any:
    """Return the class of the table, a private one of torch; None where it has another name or form."""
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry
    except ImportError:
        return None
    known = isinstance(ONNXRegistry.__dict__.get("from_torchlib"), classmethod)
    return ONNXRegistry if known and hasattr(ONNXRegistry(), "functions") else None


def _copied(table: Any) -> Any:
    """Copy a table, so that operators registered in one export are not those of the next."""
    found = copy.copy(table)
    found.functions = {target: list(forms) for target, forms in table.functions.items()}
    return found


def mended() -> dict[Any, Any]:
    """Return forms of ours for operators that the exporter writes wrongly or fails on, by operator of torch.

    A remainder by a size that is not fixed (an index of padding by reflection) fails there: it expects a number.
    """
    import onnx_ir as ir
    import torch
    from onnxscript import opset18 as op

    def remainder(value: Any, divisor: Any) -> Any:
        if isinstance(divisor, int | float):
            divisor = op.Constant(value=ir.serde.serialize_tensor(ir.tensor(divisor, dtype=value.dtype)))
        else:
            divisor = op.CastLike(divisor, value)
        if value.dtype.is_integer():
            return op.Mod(value, divisor)
        rest = op.Mod(value, divisor, fmod=1)
        zero = op.Constant(value=ir.serde.serialize_tensor(ir.tensor(0.0, dtype=value.dtype)))
        other_sign = op.Xor(op.Less(rest, zero), op.Less(divisor, zero))
        wrong = op.And(other_sign, op.Not(op.Equal(rest, zero)))
        return op.Where(wrong, op.Add(rest, divisor), rest)

    return {torch.ops.aten.remainder.Scalar: remainder}
