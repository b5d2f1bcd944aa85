"""Elementwise operators: arithmetic, comparison, logic, activations, casts."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .operators import MICROSOFT, Node, operator
from .values import NARROW, Unsupported, number_of, torch_dtype

UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)  # torch computes with few operators of them
_LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e4m3fnuz: 240.0,
    torch.float8_e5m2: 57344.0,
    torch.float8_e5m2fnuz: 57344.0,
}


def signed(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute with int64 in place of wide unsigned integers; values of uint64 from 2**63 on are not held."""

    def run(*inputs: Tensor) -> Tensor:
        dtype = inputs[0].dtype
        if dtype not in UNSIGNED:
            return function(*inputs)
        found = function(*(x.to(torch.int64) if x.dtype in UNSIGNED else x for x in inputs))
        return found.to(dtype) if found.dtype == torch.int64 else found

    return run


_UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Asin": torch.asin, "Asinh": torch.asinh,
    "Atan": torch.atan, "Atanh": torch.atanh, "BitwiseNot": torch.bitwise_not, "Ceil": torch.ceil, "Cos": torch.cos,
    "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish,
    "IsNaN": torch.isnan, "Log": torch.log, "Mish": F.mish, "Neg": torch.neg, "Not": torch.logical_not,
    "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round, "Sigmoid": torch.sigmoid,
    "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh, "Softsign": F.softsign, "Sqrt": torch.sqrt,
    "Tan": torch.tan, "Tanh": torch.tanh,
}  # fmt: skip


@operator(*_UNARY)
def unary(node: Node, x: Tensor) -> Tensor:
    return signed(_UNARY[node.op])(x)


@operator("Identity")
def identity(node: Node, x: Any) -> Any:
    return x


def _divide(a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() or a.is_complex() else torch.div(a, b, rounding_mode="trunc")


_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "Add": torch.add, "Sub": torch.sub, "Mul": torch.mul, "Div": _divide, "Equal": torch.eq, "Less": torch.lt,
    "LessOrEqual": torch.le, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "And": torch.logical_and,
    "Or": torch.logical_or, "Xor": torch.logical_xor, "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or, "BitwiseXor": torch.bitwise_xor,
}  # fmt: skip


@operator(*_BINARY)
def binary(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return signed(_BINARY[node.op])(a, b)


@operator("Mod")
def modulo(node: Node, a: Tensor, b: Tensor) -> Tensor:
    return signed(torch.fmod if node.get("fmod", 0) else torch.remainder)(a, b)


@operator("BitShift")
def bit_shift(node: Node, a: Tensor, b: Tensor) -> Tensor:
    """Shift; by less than 0 or by the width and more, every bit is moved out."""
    left = node.get("direction") == "LEFT"
    if a.dtype == torch.uint64 and not left:
        raise Unsupported("uint64 shifted to the right")
    wide, by = a.to(torch.int64), b.to(torch.int64)
    by = torch.where((by < 0) | (by >= a.dtype.itemsize * 8), torch.full_like(by, 63), by)
    if left:
        return torch.where(by == 63, torch.zeros_like(wide), wide << by).to(a.dtype)
    return (wide >> by).to(a.dtype)


@operator("Max", "Min", "Sum", "Mean")
def variadic(node: Node, *inputs: Tensor) -> Tensor:
    steps: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"Max": torch.maximum, "Min": torch.minimum}
    found = reduce(signed(steps.get(node.op, torch.add)), inputs)
    return found / len(inputs) if node.op == "Mean" else found


@operator("Pow")
def power(node: Node, x: Tensor, y: Tensor) -> Tensor:
    """Raise to a power in the dtype of the base."""
    known = node.known.get(1, [])
    if len(known) == 1 and y.dim() <= x.dim() and x.is_floating_point():
        return torch.pow(x, known[0])
    if x.is_floating_point() or (not y.is_floating_point() and x.dtype not in UNSIGNED):
        return torch.pow(x, y).to(x.dtype)
    return torch.pow(x.double(), y.double()).to(x.dtype)


@operator("Clip")
def clip(node: Node, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    """Clip; where the least is above the largest, the largest holds."""
    if low is None and high is None:
        return x
    is_known = (low is None or 1 in node.known) and (high is None or 2 in node.known)
    if x.is_floating_point() and is_known:
        least, most = (None if v is None else node.known[i][0] for i, v in ((1, low), (2, high)))
        return torch.clamp(x, least, most)
    found = x if low is None else signed(torch.maximum)(x, low)
    return found if high is None else signed(torch.minimum)(found, high)


@operator("Where")
def where(node: Node, condition: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return torch.where(condition, a, b)


@operator("Cast")
def cast(node: Node, x: Tensor) -> Tensor:
    return to_type(x, int(node.get("to")), bool(node.get("saturate", 1)), node.get("round_mode", "up"))


@operator("CastLike")
def cast_like(node: Node, x: Tensor, like: Tensor) -> Tensor:
    return to_type(x, node.types.get(1, number_of(like.dtype)), bool(node.get("saturate", 1)))


def to_type(x: Tensor, number: int, saturate: bool = True, round_mode: str = "up") -> Tensor:
    """Convert to a `TensorProto.DataType`: toward zero to integers, beyond the range of 8-bit floats to its end."""
    dtype = torch_dtype(number)
    if x.is_complex():
        raise Unsupported("a cast of complex numbers")
    if number in NARROW:
        low, high = NARROW[number]
        return (((x.to(torch.int64) - low) & (high - low)) + low).to(dtype)
    if dtype in _LARGEST:
        return _to_float8(x.float(), dtype, saturate)
    if x.is_floating_point() and dtype.itemsize < 4 and not dtype.is_floating_point and dtype != torch.bool:
        return x.to(torch.int64).to(dtype)
    return x.to(dtype)


def _to_float8(x: Tensor, dtype: torch.dtype, saturate: bool) -> Tensor:
    largest = _LARGEST[dtype]
    if saturate:
        return torch.where(x.isnan(), x, x.clamp(-largest, largest)).to(dtype)
    if dtype == torch.float8_e4m3fn:  # it has no infinity; half a step above the largest rounds to it
        x = torch.where(x.abs() > largest + 16, torch.full_like(x, math.nan), x)
    return x.to(dtype)


@operator("BitCast")
def bit_cast(node: Node, x: Tensor) -> Tensor:
    return x.view(torch_dtype(int(node.get("to"))))


def _selu(node: Node, x: Tensor) -> Tensor:
    alpha, gamma = node.get("alpha", 1.67326319217681884765625), node.get("gamma", 1.05070102214813232421875)
    return torch.where(x > 0, gamma * x, gamma * alpha * torch.expm1(x.clamp(max=0)))


def _threshold(node: Node, x: Tensor) -> Tensor:
    return torch.where(x > node.get("alpha", 1.0), x, torch.zeros_like(x))


def _gelu(node: Node, x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh" if node.get("approximate") == "tanh" else "none")


_ACTIVATIONS: dict[str, Callable[[Node, Tensor], Tensor]] = {
    "Celu": lambda node, x: F.celu(x, node.get("alpha", 1.0)),
    "Elu": lambda node, x: F.elu(x, node.get("alpha", 1.0)),
    "Gelu": _gelu,
    "HardSigmoid": lambda node, x: torch.clamp(x * node.get("alpha", 0.2) + node.get("beta", 0.5), 0, 1),
    "LeakyRelu": lambda node, x: F.leaky_relu(x, node.get("alpha", 0.01)),
    "QuickGelu": lambda node, x: x * torch.sigmoid(node.get("alpha", 1.702) * x),
    "Selu": _selu,
    "Softplus": lambda node, x: torch.logaddexp(x, torch.zeros_like(x)),
    "Swish": lambda node, x: x * torch.sigmoid(node.get("alpha", 1.0) * x),
    "ThresholdedRelu": _threshold,
}


@operator(*(_ACTIVATIONS.keys() - {"QuickGelu"}))
@operator("Gelu", "QuickGelu", domain=MICROSOFT)
def activation(node: Node, x: Tensor) -> Tensor:
    return _ACTIVATIONS[node.op](node, x)


@operator("PRelu")
def prelu(node: Node, x: Tensor, slope: Tensor) -> Tensor:
    return torch.where(x < 0, slope * x, x)


@operator("Shrink")
def shrink(node: Node, x: Tensor) -> Tensor:
    bias, edge = node.get("bias", 0.0), node.get("lambd", 0.5)
    zero = torch.zeros_like(x)
    return torch.where(x < -edge, x + bias, torch.where(x > edge, x - bias, zero)).to(x.dtype)


@operator("SwiGLU")
def swiglu(node: Node, gate: Tensor, x: Tensor) -> Tensor:
    return _ACTIVATIONS["Swish"](node, gate) * x


@operator("FastGelu", domain=MICROSOFT)
def fast_gelu(node: Node, x: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.gelu(x if bias is None else x + bias, approximate="tanh")


@operator("BiasGelu", domain=MICROSOFT)
def bias_gelu(node: Node, x: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x + bias)


@operator("IsInf")
def is_inf(node: Node, x: Tensor) -> Tensor:
    found = torch.zeros_like(x, dtype=torch.bool)
    wide = x.float() if x.dtype in _LARGEST else x
    if node.get("detect_positive", 1):
        found = found | (wide == math.inf)
    return found | (wide == -math.inf) if node.get("detect_negative", 1) else found


@operator("Dropout", sizes=(2,))
def dropout(node: Node, x: Tensor, ratio: Tensor | None = None, training: list[Any] | None = None) -> Any:
    """Return the input: dropout does nothing in inference."""
    if training is not None and any(training):
        raise Unsupported("training mode")
    return (x, torch.ones_like(x, dtype=torch.bool)) if node.wants(1) else x


@operator(
    "RandomNormal", "RandomUniform", "RandomNormalLike", "RandomUniformLike", "Bernoulli", "Multinomial"
)
def random(node: Node, *inputs: Tensor) -> Tensor:
    raise Unsupported("random numbers")
