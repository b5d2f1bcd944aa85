"""Fourier transforms, windows and mel weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .operators import Node, operator
from .values import Unsupported

_WINDOWS: dict[str, Callable[[Tensor], Tensor]] = {
    "HannWindow": lambda a: 0.5 - 0.5 * torch.cos(a),
    "HammingWindow": lambda a: 25 / 46 - 21 / 46 * torch.cos(a),
    "BlackmanWindow": lambda a: 0.42 - 0.5 * torch.cos(a) + 0.08 * torch.cos(2 * a),
}


@operator(*_WINDOWS, sizes=(0,))
def window(node: Node, size: list[Any]) -> Tensor:
    count = size[0]
    period = count if node.get("periodic", 1) else count - 1
    angle = torch.arange(count, dtype=torch.float64) * (2 * math.pi) / period
    return _WINDOWS[node.op](angle).to(node.dtype("output_datatype", torch.float32))


@operator("DFT", sizes=(1, 2))
def dft(node: Node, x: Tensor, length: list[Any] | None = None, axis: list[int] | None = None) -> Tensor:
    """Transform data whose last axis has the real and, if 2 long, the imaginary part."""
    size, usual = length[0] if length else None, -2 if node.version >= 20 else 1
    along = (axis[0] if axis else usual) % x.dim()
    if node.get("inverse", 0):
        if node.get("onesided", 0):
            half = torch.view_as_complex(x.contiguous())
            return torch.fft.irfft(half, size, along).unsqueeze(-1)
        return torch.view_as_real(torch.fft.ifft(_complex(x), size, along))
    if node.get("onesided", 0) and x.shape[-1] == 1:
        return torch.view_as_real(torch.fft.rfft(x[..., 0], size, along))
    found = torch.fft.fft(_complex(x), size, along)
    if node.get("onesided", 0):
        found = found.narrow(along, 0, found.shape[along] // 2 + 1)
    return torch.view_as_real(found)


def _complex(x: Tensor) -> Tensor:
    return (
        torch.view_as_complex(x.contiguous()) if x.shape[-1] == 2 else torch.complex(x[..., 0], x[..., 0] * 0)
    )


@operator("STFT", sizes=(1, 3))
def stft(
    node: Node, x: Tensor, hop: list[Any], shape: Tensor | None = None, length: list[Any] | None = None
) -> Tensor:
    """Transform overlapping frames of [batch, samples, 1]; without padding at the ends."""
    if x.dim() == 3 and x.shape[-1] == 2:
        raise Unsupported("complex signals")
    signal = x[..., 0] if x.dim() == 3 else x
    if length is None and shape is None:
        raise Unsupported("no frame length")
    size = length[0] if length else shape.shape[0]  # type: ignore[union-attr]
    frames = signal.unfold(1, size, hop[0])
    if shape is not None:
        frames = frames * shape
    found = torch.fft.rfft(frames) if node.get("onesided", 1) else torch.fft.fft(frames)
    return torch.view_as_real(found)


@operator("MelWeightMatrix", sizes=(0, 1, 2, 3, 4))
def mel_weights(
    node: Node, bands: list[Any], length: list[Any], rate: list[Any], low: list[Any], high: list[Any]
) -> Tensor:
    """Return triangles [length / 2 + 1, bands] between places that are even on the mel scale."""
    bins, count = length[0] // 2 + 1, bands[0]

    def mel(frequency: float) -> float:
        return 2595 * math.log10(1 + frequency / 700)

    step = (mel(high[0]) - mel(low[0])) / (count + 2)
    centres = [mel(low[0]) + i * step for i in range(count + 2)]
    hertz = [700 * (10 ** (m / 2595) - 1) for m in centres]
    places = [int((length[0] + 1) * f // rate[0]) for f in hertz]
    weights = torch.zeros(bins, count)
    for i in range(count):
        left, centre, right = places[i : i + 3]
        if centre == left:
            weights[centre, i] = 1
        for j in range(left, centre + 1) if centre > left else ():
            weights[j, i] = (j - left) / (centre - left)
        for j in range(centre, right) if right > centre else ():
            weights[j, i] = (right - j) / (right - centre)
    return weights.to(node.dtype("output_datatype", torch.float32))
