"""Random valid ONNX graphs, of the operators that optimizers like to merge, move and replace; all decided by a seed.

The first axis of every value is the batch and no operator mixes its rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSETS = (13, 16, 17, 18, 20)
TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
    np.dtype(np.bool_): TensorProto.BOOL,
}
F32, F64, I64, I32, BOOL = (np.dtype(t) for t in (np.float32, np.float64, np.int64, np.int32, np.bool_))


@dataclass(frozen=True)
class Value:
    """A value of the graph; `shape` is that of one row."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def floating(self) -> bool:
        return self.dtype.kind == "f"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


class Graph:
    """A graph under construction."""

    def __init__(self, seed: int) -> None:
        self.draw, self.numbers = random.Random(seed), np.random.default_rng(seed)
        self.opset = self.draw.choice(OPSETS)
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.values: list[Value] = []

    def constant(self, value: Any, dtype: Any = None) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(value, dtype=dtype), name))
        return name

    def emit(self, op: str, inputs: list[str], count: int = 1, **attributes: Any) -> list[str]:
        names = [f"v{len(self.nodes)}_{i}" for i in range(count)]
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names

    def one(self, op: str, inputs: list[str], like: Value, **attributes: Any) -> Value:
        """Emit a node whose output is of the type and shape of `like`."""
        return Value(self.emit(op, inputs, **attributes)[0], like.dtype, like.shape)

    def floats(self, *shape: int, scale: float = 1.0, dtype: Any = F32) -> str:
        return self.constant(self.numbers.standard_normal(shape) * scale, dtype)

    def reduce(self, op: str, x: Value, axis: int, *, keep: bool = True) -> Value:
        """Reduce one axis of a row."""
        inputs, attributes = [x.name], {"keepdims": int(keep)}
        if op == "ReduceSum" or self.opset >= 18:
            inputs.append(self.constant([axis + 1], I64))
        else:
            attributes["axes"] = [axis + 1]  # type: ignore[assignment]
        shape = list(x.shape)
        shape[axis : axis + 1] = [1] if keep else []
        return Value(self.emit(op, inputs, **attributes)[0], x.dtype, tuple(shape))

    def cast(self, x: Value, dtype: np.dtype[Any]) -> Value:
        return Value(self.emit("Cast", [x.name], to=TYPES[dtype])[0], dtype, x.shape)

    def scalar(self, x: Value, value: float) -> str:
        return self.constant(value, x.dtype)


Block = Callable[[Graph, Value], Value | None]


# Floats of any shape


def activation(g: Graph, x: Value) -> Value:
    op = g.draw.choice(("Relu", "Sigmoid", "Tanh", "LeakyRelu", "Elu", "HardSigmoid", "Softplus", "Abs", "Neg", "Floor",
                        "Ceil", "Round", "Sign", "Erf", "Sin", "Selu", "Softsign", "ThresholdedRelu",
                        *(("HardSwish",) if g.opset >= 14 else ())))  # fmt: skip
    attributes = (
        {"alpha": g.draw.choice((0.1, 0.5, 1.5))} if op in ("LeakyRelu", "Elu", "ThresholdedRelu") else {}
    )
    return g.one(op, [x.name], x, **attributes)


def arithmetic(g: Graph, x: Value) -> Value:
    op = g.draw.choice(("Add", "Sub", "Mul", "Div"))
    value = (
        g.draw.choice((0.0, 1.0, -1.0, 0.5, 3.0, 1e-3, -2.5))
        if op != "Div"
        else g.draw.choice((2.0, -3.0, 0.3))
    )
    other = g.scalar(x, value)
    if x.shape and g.draw.random() < 0.4 and op != "Div":
        other = g.floats(x.shape[-1], dtype=x.dtype)
    pair = [x.name, other]
    return g.one(op, pair[::-1] if g.draw.random() < 0.2 and op != "Div" else pair, x)


def power(g: Graph, x: Value) -> Value:
    exponent = g.draw.choice((2.0, 3.0, 4.0, 0.0, 1.0, 0.5))
    base = g.one("Abs", [x.name], x) if exponent == 0.5 else x
    kind = g.draw.choice((x.dtype, I64, I32)) if exponent != 0.5 else x.dtype
    return g.one("Pow", [base.name, g.constant(exponent, kind)], x)


def root(g: Graph, x: Value) -> Value:
    positive = g.one("Abs", [x.name], x)
    op = g.draw.choice(("Sqrt", "Reciprocal", "Log"))
    shifted = g.one("Add", [positive.name, g.scalar(x, g.draw.choice((0.5, 1.0, 2.0)))], x)
    return g.one(op, [shifted.name], x)


def norm(g: Graph, x: Value) -> Value | None:
    """Subtract a mean, raise to a power, divide by a root: LayerNorm and what only looks like it."""
    if not x.shape or x.shape[-1] < 2:
        return None
    axis = g.draw.choice((len(x.shape) - 1, len(x.shape) - 1, g.draw.randrange(len(x.shape))))
    mean = g.reduce(g.draw.choice(("ReduceMean", "ReduceMean", "ReduceMean", "ReduceMax")), x, axis)
    centred = g.one("Sub", [x.name, mean.name] if g.draw.random() < 0.85 else [mean.name, x.name], x)
    kind = g.draw.random()
    if kind < 0.6:
        squares = g.one("Pow", [centred.name, g.scalar(x, g.draw.choice((2.0, 2.0, 4.0)))], x)
    else:
        squares = g.one("Mul", [centred.name, g.draw.choice((centred.name, centred.name, x.name))], x)
    second = axis if g.draw.random() < 0.8 else g.draw.randrange(len(x.shape))
    variance = g.reduce(g.draw.choice(("ReduceMean", "ReduceMean", "ReduceSum")), squares, second)
    variance = g.one("Abs", [variance.name], variance) if kind >= 0.6 else variance
    shifted = g.one("Add", [variance.name, g.scalar(x, g.draw.choice((1e-5, 1e-12 + 1e-3, 0.5)))], variance)
    deviation = g.one("Sqrt", [shifted.name], shifted)
    y = g.one("Div", [g.draw.choice((centred.name, centred.name, x.name)), deviation.name], x)
    if g.draw.random() < 0.6:
        y = g.one("Mul", [y.name, g.floats(x.shape[-1], dtype=x.dtype)], y)
        y = g.one("Add", [y.name, g.floats(x.shape[-1], dtype=x.dtype)], y)
    return y


def rms_norm(g: Graph, x: Value) -> Value | None:
    if not x.shape or x.shape[-1] < 2:
        return None
    axis = len(x.shape) - 1
    squares = g.one("Pow", [x.name, g.scalar(x, g.draw.choice((2.0, 4.0)))], x)
    mean = g.reduce(g.draw.choice(("ReduceMean", "ReduceSum")), squares, axis)
    root = g.one(
        "Sqrt", [g.one("Add", [mean.name, g.scalar(x, g.draw.choice((1e-5, 0.3)))], mean).name], mean
    )
    if g.draw.random() < 0.5:
        y = g.one("Mul", [x.name, g.one("Reciprocal", [root.name], root).name], x)
    else:
        y = g.one("Div", [x.name, root.name], x)
    return g.one("Mul", [y.name, g.floats(x.shape[-1], dtype=x.dtype)], y)


def layer_norm(g: Graph, x: Value) -> Value | None:
    if g.opset < 17 or not x.shape or x.dtype != F32:
        return None
    axis = g.draw.randrange(len(x.shape))
    shape = x.shape[axis:]
    inputs = [x.name, g.floats(*shape)] + ([g.floats(*shape)] if g.draw.random() < 0.7 else [])
    skipped = g.one("Add", [x.name, activation(g, x).name], x) if g.draw.random() < 0.4 else x
    return g.one("LayerNormalization", [skipped.name, *inputs[1:]], x, axis=axis + 1,
                 epsilon=g.draw.choice((1e-5, 1e-12, 0.1)))  # fmt: skip


def gelu(g: Graph, x: Value) -> Value:
    """Multiply half of x by one plus an erf or a tanh, with the right constants or others."""
    root = g.draw.choice((1.4142135, 1.4142135, 1.702, 2.0))
    if g.draw.random() < 0.6:
        inner = g.one("Erf", [g.one("Div", [x.name, g.scalar(x, root)], x).name], x)
    else:
        cube = g.one("Pow", [x.name, g.scalar(x, g.draw.choice((3.0, 3.0, 2.0)))], x)
        bent = g.one("Mul", [cube.name, g.scalar(x, g.draw.choice((0.044715, 0.1)))], x)
        total = g.one("Add", [x.name, bent.name], x)
        inner = g.one("Tanh", [g.one("Mul", [total.name, g.scalar(x, 0.7978845)], x).name], x)
    shifted = g.one("Add", [inner.name, g.scalar(x, g.draw.choice((1.0, 1.0, 0.5)))], x)
    product = g.one("Mul", [x.name, shifted.name], x)
    return g.one("Mul", [product.name, g.scalar(x, g.draw.choice((0.5, 0.5, 0.25)))], x)


def softmax(g: Graph, x: Value) -> Value | None:
    if not x.shape:
        return None
    axis = g.draw.randrange(len(x.shape)) + 1
    if g.draw.random() < 0.6:
        return g.one(g.draw.choice(("Softmax", "LogSoftmax")), [x.name], x, axis=axis)
    largest = g.reduce("ReduceMax", x, axis - 1)
    powers = g.one("Exp", [g.one("Sub", [x.name, largest.name], x).name], x)
    return g.one("Div", [powers.name, g.reduce("ReduceSum", powers, axis - 1).name], x)


def clip(g: Graph, x: Value) -> Value:
    if x.dtype == F32 and g.draw.random() < 0.6:
        low, high = g.draw.choice(((0.0, 6.0), (-1.0, 1.0), (0.0, 1.0), (-3.0, -1.0)))
        y = g.one("Clip", [x.name, g.scalar(x, low), g.scalar(x, high)], x)
        return g.one("Clip", [y.name, g.scalar(x, -0.5), g.scalar(x, 2.0)], y) if g.draw.random() < 0.3 else y
    op = g.draw.choice(("Min", "Max"))
    return g.one(op, [x.name, g.scalar(x, g.draw.choice((0.0, 0.5, -1.0)))], x)


def where(g: Graph, x: Value) -> Value:
    op = g.draw.choice(("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"))
    if op == "Equal" and x.floating:
        op = "Greater"
    test = Value(g.emit(op, [x.name, g.scalar(x, g.draw.choice((0, 1, -1)))])[0], BOOL, x.shape)
    if g.draw.random() < 0.3:
        test = g.one("Not", [test.name], test)
    other = (
        g.one("Neg", [x.name], x).name if g.draw.random() < 0.5 else g.scalar(x, g.draw.choice((0, 5, -7)))
    )
    return g.one("Where", [test.name, *((x.name, other) if g.draw.random() < 0.5 else (other, x.name))], x)


def quantized(g: Graph, x: Value) -> Value | None:
    """Round to one to three grids, with their own steps and zero points, and something between them."""
    if x.dtype != F32:
        return None
    y = x
    step = g.draw.choice((0.05, 0.1, 0.02))
    for _ in range(g.draw.choice((1, 2, 2, 3))):
        signed = g.draw.random() < 0.4
        zero = g.constant(
            g.draw.choice((0, 5, -20) if signed else (128, 120, 20, 0, 255)), np.int8 if signed else np.uint8
        )
        step = g.draw.choice((step, step, step * 2))
        scale = g.constant(step, F32)
        codes = g.emit("QuantizeLinear", [y.name, scale, zero])[0]
        if g.draw.random() < 0.15 and len(x.shape) > 1:
            axes = list(range(1, len(y.shape) + 1))
            axes[-1], axes[-2] = axes[-2], axes[-1]
            codes = g.emit("Transpose", [codes], perm=[0, *axes])[0]
            y = Value(y.name, y.dtype, (*y.shape[:-2], y.shape[-1], y.shape[-2]))
        back = g.constant(step * g.draw.choice((1, 1, 1, 1.5)), F32)
        y = Value(g.emit("DequantizeLinear", [codes, back, zero])[0], F32, y.shape)
        if g.draw.random() < 0.3:
            y = g.one(g.draw.choice(("Relu", "Neg", "Abs")), [y.name], y)
    return y


def double(g: Graph, x: Value) -> Value | None:
    """Take a detour in float64, with a number that float32 can't hold."""
    if x.dtype != F32:
        return None
    y = g.cast(x, F64)
    large = g.constant(g.draw.choice((1.7e9, 123456789.125, 1e11)), F64)
    y = g.one("Sub", [g.one("Add", [y.name, large], y).name, large], y)
    return g.cast(y, F32) if g.draw.random() < 0.7 else y


def single(g: Graph, x: Value) -> Value:
    return g.cast(x, F32)


def to_integers(g: Graph, x: Value) -> Value:
    scaled = g.one("Mul", [x.name, g.scalar(x, g.draw.choice((1, 10, 1000, 3e6)))], x)
    return g.cast(scaled, g.draw.choice((I64, I32)))


def reduction(g: Graph, x: Value) -> Value | None:
    if not x.shape or x.size > 4096:
        return None
    op = g.draw.choice(("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceL1", "ReduceL2", "ReduceSumSquare",
                        "ReduceLogSumExp", "ReduceProd"))  # fmt: skip
    if not x.floating or x.dtype == F64:
        op = g.draw.choice(("ReduceSum", "ReduceMax", "ReduceMin"))
    if op == "ReduceProd":
        x = clip(g, x)
    return g.reduce(op, x, g.draw.randrange(len(x.shape)), keep=g.draw.random() < 0.5 or len(x.shape) == 1)


def matmul(g: Graph, x: Value) -> Value | None:
    if not x.shape or x.shape[-1] > 256 or x.dtype == F64:
        return None
    columns = g.draw.choice((1, 3, 8, 16))
    shape = (*x.shape[:-1], columns)
    if x.floating:
        weight = g.floats(x.shape[-1], columns, scale=x.shape[-1] ** -0.5)
        y = Value(g.emit("MatMul", [x.name, weight])[0], F32, shape)
        if len(x.shape) == 1 and g.draw.random() < 0.4:
            alpha, beta = g.draw.choice((1.0, 0.5)), g.draw.choice((1.0, 2.0, 0.0))
            gemm = [x.name, g.floats(columns, x.shape[0], scale=x.shape[0] ** -0.5), g.floats(columns)]
            y = Value(g.emit("Gemm", gemm, alpha=alpha, beta=beta, transB=1)[0], F32, shape)
        return g.one("Add", [y.name, g.floats(columns)], y) if g.draw.random() < 0.6 else y
    weight = g.constant(g.numbers.integers(-9, 9, (x.shape[-1], columns)), x.dtype)
    return Value(g.emit("MatMul", [x.name, weight])[0], x.dtype, shape)


def attention(g: Graph, x: Value) -> Value | None:
    if len(x.shape) != 2 or x.dtype != F32 or x.size > 1024:
        return None
    width = x.shape[1]
    weights = [g.floats(width, width, scale=width**-0.5) for _ in range(3)]
    q, k, v = (Value(g.emit("MatMul", [x.name, weight])[0], F32, x.shape) for weight in weights)
    turned = g.emit("Transpose", [k.name], perm=[0, 2, 1])[0]
    scores = Value(g.emit("MatMul", [q.name, turned])[0], F32, (x.shape[0], x.shape[0]))
    scores = g.one(
        g.draw.choice(("Mul", "Div")), [scores.name, g.scalar(x, g.draw.choice((0.5, 2.0, 1.0)))], scores
    )
    if g.draw.random() < 0.5:
        mask = np.triu(np.full(scores.shape, -1e9, np.float32), 1 if g.draw.random() < 0.7 else 2)
        scores = g.one("Add", [scores.name, g.constant(mask)], scores)
    shares = g.one("Softmax", [scores.name], scores, axis=g.draw.choice((-1, -1, 1)))
    return Value(g.emit("MatMul", [shares.name, v.name])[0], F32, x.shape)


# Of any type: places


def transpose(g: Graph, x: Value) -> Value | None:
    if len(x.shape) < 2:
        return None
    order = list(range(len(x.shape)))
    g.draw.shuffle(order)
    name = g.emit("Transpose", [x.name], perm=[0, *(i + 1 for i in order)])[0]
    return Value(name, x.dtype, tuple(x.shape[i] for i in order))


def reshape(g: Graph, x: Value) -> Value | None:
    if x.size < 2:
        return None
    kind = g.draw.random()
    if kind < 0.4:
        shape: tuple[int, ...] = (x.size,)
    else:
        factors = [d for d in range(1, x.size + 1) if x.size % d == 0]
        first = g.draw.choice(factors)
        shape = (first, x.size // first)
    target = [0, *shape] if g.draw.random() < 0.5 else [-1, *shape]
    return Value(g.emit("Reshape", [x.name, g.constant(target, I64)])[0], x.dtype, shape)


def slicing(g: Graph, x: Value) -> Value | None:
    if not x.shape:
        return None
    axis = g.draw.randrange(len(x.shape))
    size = x.shape[axis]
    start, end, step = g.draw.choice(((0, size, 2), (-1, -(size + 1), -1), (1, 1 << 40, 1), (-2, size, 1), (0, -1, 1),
                                      (size - 1, -(1 << 40), -2)))  # fmt: skip
    length = len(range(size)[slice(start, None if end == -(size + 1) or end < -size else end, step)])
    if not length:
        return None
    inputs = [x.name, *(g.constant([value], I64) for value in (start, end, axis + 1, step))]
    return Value(g.emit("Slice", inputs)[0], x.dtype, (*x.shape[:axis], length, *x.shape[axis + 1 :]))


def gather(g: Graph, x: Value) -> Value | None:
    if not x.shape:
        return None
    axis = g.draw.randrange(len(x.shape))
    size = x.shape[axis]
    index = [g.draw.randrange(-size, size) for _ in range(g.draw.choice((1, 2, 3)))]
    name = g.emit("Gather", [x.name, g.constant(index, g.draw.choice((I64, I32)))], axis=axis + 1)[0]
    return Value(name, x.dtype, (*x.shape[:axis], len(index), *x.shape[axis + 1 :]))


def concat(g: Graph, x: Value) -> Value | None:
    if not x.shape or x.size > 2048:
        return None
    axis = g.draw.randrange(len(x.shape))
    alike = [v for v in g.values if v.dtype == x.dtype and len(v.shape) == len(x.shape)
             and v.shape[:axis] == x.shape[:axis] and v.shape[axis + 1 :] == x.shape[axis + 1 :]]  # fmt: skip
    other = g.draw.choice(alike) if alike else x
    name = g.emit("Concat", [x.name, other.name], axis=axis + 1)[0]
    return Value(name, x.dtype, (*x.shape[:axis], x.shape[axis] + other.shape[axis], *x.shape[axis + 1 :]))


def padded(g: Graph, x: Value) -> Value | None:
    if not x.shape or not (x.floating or x.dtype == I64) or x.dtype == F64:
        return None
    mode = g.draw.choice(("constant", "constant", "reflect", "edge")) if x.floating else "constant"
    most = min(2, min(x.shape) - 1)
    if mode != "constant" and most < 1:
        return None
    low = -1 if mode == "constant" and min(x.shape) > 3 else 0
    before = [g.draw.randint(low, max(most, 1) if mode == "constant" else most) for _ in x.shape]
    after = [g.draw.randint(0, max(most, 1) if mode == "constant" else most) for _ in x.shape]
    inputs = [x.name, g.constant([0, *before, 0, *after], I64)]
    if mode == "constant":
        inputs.append(g.scalar(x, g.draw.choice((0, 0, 1, -3))))
    shape = tuple(size + b + a for size, b, a in zip(x.shape, before, after, strict=True))
    return Value(g.emit("Pad", inputs, mode=mode)[0], x.dtype, shape)


def other_value(g: Graph, x: Value) -> Value | None:
    """Join with an earlier value: a residual, a gate, a quotient."""
    alike = [v for v in g.values if v.dtype == x.dtype and v.shape == x.shape]
    if not alike:
        return None
    ops = ("Add", "Sub", "Mul", "Max", "Min") if x.dtype != F64 else ("Add", "Sub", "Mul")
    return g.one(g.draw.choice(ops), [x.name, g.draw.choice(alike).name], x)


def cumulative(g: Graph, x: Value) -> Value | None:
    if not x.shape or x.size > 512:
        return None
    axis = g.constant(g.draw.randrange(len(x.shape)) + 1, I64)
    return g.one("CumSum", [x.name, axis], x, exclusive=g.draw.choice((0, 1)), reverse=g.draw.choice((0, 1)))


def top(g: Graph, x: Value) -> Value | None:
    """Take the largest or smallest and where they are, ties and all."""
    if not x.shape:
        return None
    axis = g.draw.randrange(len(x.shape))
    rounded = g.one("Round", [x.name], x) if x.floating and g.draw.random() < 0.5 else x
    if g.draw.random() < 0.4 and x.dtype != I64:
        op, keep = g.draw.choice(("ArgMax", "ArgMin")), g.draw.choice((0, 1))
        if len(x.shape) == 1:
            keep = 1
        name = g.emit(op, [rounded.name], axis=axis + 1, keepdims=keep,
                      select_last_index=g.draw.choice((0, 0, 1)))[0]  # fmt: skip
        return Value(name, I64, (*x.shape[:axis], *((1,) if keep else ()), *x.shape[axis + 1 :]))
    count = g.draw.randint(1, x.shape[axis])
    names = g.emit(
        "TopK", [rounded.name, g.constant([count], I64)], 2, axis=axis + 1, largest=g.draw.choice((0, 1))
    )
    shape = (*x.shape[:axis], count, *x.shape[axis + 1 :])
    pair = Value(names[0], x.dtype, shape), Value(names[1], I64, shape)
    g.values.extend(pair)
    return g.draw.choice(pair)


# Integers


def integers(g: Graph, x: Value) -> Value:
    op = g.draw.choice(("Add", "Sub", "Mul", "Div", "Mod", "Mod", "Pow", "Neg", "Abs", "Min", "Max"))
    if op in ("Neg", "Abs"):
        return g.one(op, [x.name], x)
    value = g.draw.choice((1, 2, 3, -7, 1000, 65537, 2654435761 if x.dtype == I64 else 40503))
    if op == "Pow":
        small = g.one("Mod", [x.name, g.scalar(x, 7)], x)
        return g.one(
            "Pow", [small.name, g.constant(g.draw.choice((2, 3, 5)), g.draw.choice((x.dtype, I64)))], x
        )
    if op == "Mod":
        return g.one("Mod", [x.name, g.scalar(x, value)], x, fmod=g.draw.choice((0, 0, 1)))
    pair = [x.name, g.scalar(x, value)]
    return g.one(op, pair, x)


def from_integers(g: Graph, x: Value) -> Value:
    return g.cast(x, g.draw.choice((F32, F32, F64)))


def other_integers(g: Graph, x: Value) -> Value:
    return g.cast(x, I32 if x.dtype == I64 else I64)


def table(g: Graph, x: Value) -> Value | None:
    if len(x.shape) > 2:
        return None
    index = g.one("Mod", [x.name, g.scalar(x, 11)], x)
    name = g.emit("Gather", [g.floats(11, 8), index.name])[0]
    return Value(name, F32, (*x.shape, 8))


# Images


def conv(g: Graph, x: Value) -> Value | None:
    if len(x.shape) != 3 or x.dtype != F32 or min(x.shape[1:]) < 3 or x.shape[0] > 16:
        return None
    groups = x.shape[0] if g.draw.random() < 0.2 else 1
    out = groups if groups > 1 else g.draw.choice((2, 4, 8))
    size, stride, pads, dilation = (
        g.draw.choice((1, 3, 3)),
        g.draw.choice((1, 1, 2)),
        g.draw.choice((0, 1, 1)),
        1,
    )
    if size == 3 and min(x.shape[1:]) >= 6:
        dilation = g.draw.choice((1, 1, 2))
    inputs = [x.name, g.floats(out, x.shape[0] // groups, size, size, scale=(x.shape[0] * size) ** -0.5)]
    inputs += [g.floats(out)] if g.draw.random() < 0.6 else []
    shape = tuple((n + 2 * pads - dilation * (size - 1) - 1) // stride + 1 for n in x.shape[1:])
    if min(shape) < 1:
        return None
    name = g.emit("Conv", inputs, kernel_shape=[size] * 2, strides=[stride] * 2, pads=[pads] * 4, group=groups,
                  dilations=[dilation] * 2)[0]  # fmt: skip
    y = Value(name, F32, (out, *shape))
    if g.draw.random() < 0.4:
        y = g.draw.choice((batch_norm, activation, scaled_channels))(g, y)
    return y


def batch_norm(g: Graph, x: Value) -> Value:
    if len(x.shape) != 3 or x.dtype != F32:
        return x
    channels = x.shape[0]
    variance = g.constant(g.numbers.uniform(0.01, 2, channels), F32)
    inputs = [x.name, g.floats(channels), g.floats(channels), g.floats(channels), variance]
    return g.one("BatchNormalization", inputs, x, epsilon=g.draw.choice((1e-5, 0.1)))


def scaled_channels(g: Graph, x: Value) -> Value:
    if len(x.shape) != 3 or x.dtype != F32:
        return x
    shape = (1, x.shape[0], 1, 1) if g.draw.random() < 0.7 else (1, 1, 1, x.shape[2])
    return g.one(g.draw.choice(("Mul", "Add")), [x.name, g.floats(*shape)], x)


def pool(g: Graph, x: Value) -> Value | None:
    """Pool an image, often one that was padded before, with a value that no pool pads with."""
    if len(x.shape) != 3 or x.dtype != F32 or min(x.shape[1:]) < 3:
        return None
    if g.draw.random() < 0.5:
        around, value = g.draw.choice((1, 1, 2)), g.draw.choice((0.0, 0.0, 1.0, -5.0))
        pads = [0, 0, around, around, 0, 0, around, around]
        name = g.emit("Pad", [x.name, g.constant(pads, I64), *([] if value == 0 else [g.scalar(x, value)])])[
            0
        ]
        x = Value(name, F32, (x.shape[0], *(n + 2 * around for n in x.shape[1:])))
    if g.draw.random() < 0.25:
        op = g.draw.choice(("GlobalMaxPool", "GlobalAveragePool"))
        return Value(g.emit(op, [x.name])[0], F32, (x.shape[0], 1, 1))
    op = g.draw.choice(("MaxPool", "MaxPool", "AveragePool"))
    size, stride = g.draw.choice((2, 3)), g.draw.choice((1, 2))
    pads = g.draw.choice((0, 0, 1))
    attributes: dict[str, Any] = {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [pads] * 4}
    if op == "AveragePool":
        attributes["count_include_pad"] = g.draw.choice((0, 1))
    shape = tuple((n + 2 * pads - size) // stride + 1 for n in x.shape[1:])
    return Value(g.emit(op, [x.name], **attributes)[0], F32, (x.shape[0], *shape)) if min(shape) > 0 else None


def resize(g: Graph, x: Value) -> Value | None:
    if len(x.shape) != 3 or x.dtype != F32 or x.size > 1024:
        return None
    mode = g.draw.choice(("nearest", "linear", "linear", "cubic"))
    attributes: dict[str, Any] = {"mode": mode}
    attributes["coordinate_transformation_mode"] = g.draw.choice(
        ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
    )
    if mode == "nearest":
        attributes["nearest_mode"] = g.draw.choice(
            ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
        )
    elif g.opset >= 18 and g.draw.random() < 0.4:
        attributes["antialias"] = 1
    if mode == "cubic" and g.draw.random() < 0.5:
        attributes["cubic_coeff_a"] = -0.5
    scale = g.draw.choice((2.0, 2.0, 0.5, 1.5))
    shape = tuple(int(n * scale) for n in x.shape[1:])
    if min(shape) < 1:
        return None
    name = g.emit("Resize", [x.name, "", g.constant([1.0, 1.0, scale, scale], F32)], **attributes)[0]
    return Value(name, F32, (x.shape[0], *shape))


def depth_to_space(g: Graph, x: Value) -> Value | None:
    if len(x.shape) != 3 or x.shape[0] % 4 or x.dtype != F32:
        return None
    name = g.emit("DepthToSpace", [x.name], blocksize=2, mode=g.draw.choice(("DCR", "CRD")))[0]
    return Value(name, F32, (x.shape[0] // 4, x.shape[1] * 2, x.shape[2] * 2))


ANY: tuple[Block, ...] = (
    transpose,
    reshape,
    slicing,
    gather,
    concat,
    padded,
    other_value,
    where,
    reduction,
    top,
)
FLOATS: tuple[Block, ...] = (activation, arithmetic, power, root, norm, norm, rms_norm, layer_norm, gelu, softmax, clip,
                             quantized, quantized, double, to_integers, matmul, attention, cumulative)  # fmt: skip
IMAGES: tuple[Block, ...] = (
    conv,
    conv,
    pool,
    pool,
    pool,
    resize,
    resize,
    depth_to_space,
    batch_norm,
    quantized,
    norm,
)
INTEGERS: tuple[Block, ...] = (
    integers,
    integers,
    integers,
    from_integers,
    other_integers,
    table,
    matmul,
    cumulative,
)
DOUBLES: tuple[Block, ...] = (arithmetic, power, clip, single)
SHAPES: dict[np.dtype[Any], tuple[tuple[int, ...], ...]] = {
    F32: ((8,), (4, 8), (4, 6, 6), (3, 8, 8), (3, 8, 8)),
    F64: ((8,), (4, 6)),
    I64: ((6,), (4, 6)),
    I32: ((6,), (4, 6)),
}


def make(seed: int) -> onnx.ModelProto:
    """Make the graph of a seed: one input `x`, one to three outputs; each with the batch first."""
    g = Graph(seed)
    dtype = g.draw.choice((F32, F32, F32, F32, F32, F32, I64, I64, I32, F64))
    source = Value("x", dtype, g.draw.choice(SHAPES[dtype]))
    g.values.append(source)
    wanted = g.draw.randint(1, 6)
    current, tries = source, 0
    while len(g.nodes) < 24 and wanted and tries < 40:
        tries += 1
        held = len(g.nodes), len(g.constants), len(g.values)
        made = g.draw.choice(_blocks(g, current))(g, current)
        if made is None or made is current or made.size > 8192 or made.size < 1:
            del g.nodes[held[0] :], g.constants[held[1] :], g.values[held[2] :]
            continue
        g.values.append(made)
        wanted -= 1
        current = g.draw.choice(g.values[1:]) if g.draw.random() < 0.2 else made
    if current is source:
        current = g.one("Add", ["x", "x"], source) if source.floating else integers(g, source)
    outputs = {g.values[-1].name: g.values[-1], current.name: current}
    if g.draw.random() < 0.2 and len(g.values) > 2:
        more = g.draw.choice(g.values[1:])
        outputs[more.name] = more
    outputs.pop("x", None)
    return _model(g, source, list(outputs.values()))


def _blocks(g: Graph, x: Value) -> tuple[Block, ...]:
    if g.draw.random() < 0.3 and x.dtype != F64:
        return ANY
    if x.dtype == F32:
        return IMAGES if len(x.shape) == 3 and g.draw.random() < 0.7 else FLOATS
    return INTEGERS if x.dtype in (I64, I32) else DOUBLES


def _model(g: Graph, source: Value, outputs: list[Value]) -> onnx.ModelProto:
    def info(value: Value) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(value.name, TYPES[value.dtype], ["batch", *value.shape])

    used = {name for node in g.nodes for name in node.input}
    graph = helper.make_graph(g.nodes, "g", [info(source)], [info(v) for v in outputs],
                              [c for c in g.constants if c.name in used])  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", g.opset)], ir_version=8)
    _drop_unused(model)
    return model


def _drop_unused(model: onnx.ModelProto) -> None:
    """Remove nodes that no output needs."""
    needed = {value.name for value in model.graph.output}
    for node in reversed(list(model.graph.node)):
        if needed & set(node.output):
            needed |= set(node.input)
        else:
            model.graph.node.remove(node)
    kept = [constant for constant in model.graph.initializer if constant.name in needed]
    del model.graph.initializer[:]
    model.graph.initializer.extend(kept)


def rows(model: onnx.ModelProto, count: int, seed: int) -> np.ndarray:
    """Make rows of the input of a model: normal numbers, zeros, negative, large, equal and whole ones."""
    kind = model.graph.input[0].type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
    shape = (count, *(dim.dim_value for dim in kind.shape.dim[1:]))
    numbers = np.random.default_rng(seed * 31 + 5)
    if dtype.kind == "f":
        x = numbers.standard_normal(shape) * 2
        for row in range(count):
            x[row] = (x[row], x[row].round(), -np.abs(x[row]), x[row] * 50, np.round(x[row]) / 2, x[row] * 0.01,
                      np.abs(x[row]), x[row])[row % 8]  # fmt: skip
        x[7 % count] = 0
        return x.astype(dtype)
    x = numbers.integers(-1000, 1000, shape)
    large = (1 << 40) if dtype == I64 else (1 << 20)
    for row in range(count):
        if row % 4 == 1:
            x[row] = numbers.integers(-large, large, shape[1:])
        elif row % 4 == 2:
            x[row] = numbers.integers(-3, 3, shape[1:])
    x[7 % count] = 0
    return x.astype(dtype)
