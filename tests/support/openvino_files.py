"""A small OpenVINO IR, written as text: the package openvino is not needed."""

from __future__ import annotations

from pathlib import Path

import numpy as np

ROWS, COLUMNS = 6, 4


def write_ir(path: Path, *, named: bool = True) -> np.ndarray:
    """Write `x` [?, 6] → `twice` [?, 6] and `product` [?, 4], as tensors with names or without; return the weight."""
    weight = np.random.default_rng(0).standard_normal((ROWS, COLUMNS)).astype(np.float32)
    path.with_suffix(".bin").write_bytes(weight.tobytes())
    wide, narrow, const = (-1, ROWS), (-1, COLUMNS), (ROWS, COLUMNS)
    name = lambda text: text if named else ""  # noqa: E731
    layers = [
        _layer(0, "x", "Parameter", f'shape="?,{ROWS}" element_type="f32"', [], [_port(0, wide, name("x"))]),
        _layer(
            1, "weight", "Const", f'element_type="f32" shape="{ROWS}, {COLUMNS}" offset="0" size="{weight.nbytes}"',
            [], [_port(0, const)],
        ),
        _layer(
            2, "sum", "Add", 'auto_broadcast="numpy"', [_port(0, wide), _port(1, wide)],
            [_port(2, wide, name("twice"))],
        ),
        _layer(
            3, "matmul", "MatMul", 'transpose_a="false" transpose_b="false"', [_port(0, wide), _port(1, const)],
            [_port(2, narrow, name("product"))],
        ),
        _layer(4, "first", "Result", "", [_port(0, wide)], []),
        _layer(5, "second", "Result", "", [_port(0, narrow)], []),
    ]  # fmt: skip
    pairs = ((0, 0, 2, 0), (0, 0, 2, 1), (0, 0, 3, 0), (1, 0, 3, 1), (2, 2, 4, 0), (3, 2, 5, 0))
    edges = [f'<edge from-layer="{a}" from-port="{b}" to-layer="{c}" to-port="{d}"/>' for a, b, c, d in pairs]
    graph = f"<layers>{''.join(layers)}</layers><edges>{''.join(edges)}</edges>"
    path.write_text(f'<?xml version="1.0"?>\n<net name="m" version="11">{graph}</net>')
    return weight


def _layer(number: int, name: str, kind: str, data: str, takes: list[str], gives: list[str]) -> str:
    inside = f"<data {data}/>" if data else ""
    inside += f"<input>{''.join(takes)}</input>" if takes else ""
    inside += f"<output>{''.join(gives)}</output>" if gives else ""
    return f'<layer id="{number}" name="{name}" type="{kind}" version="opset1">{inside}</layer>'


def _port(number: int, shape: tuple[int, ...], name: str = "") -> str:
    dims = "".join(f"<dim>{size}</dim>" for size in shape)
    named = f' names="{name}"' if name else ""
    return f'<port id="{number}" precision="FP32"{named}>{dims}</port>'
