"""Boxes and sampling grids: NonMaxSuppression, RoiAlign, GridSample, AffineGrid."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .operators import Node, operator
from .values import Unsupported


@operator("NonMaxSuppression", sizes=(2, 3, 4))
def non_max_suppression(
    node: Node,
    boxes: Tensor,
    scores: Tensor,
    most: list[Any] | None = None,
    overlap: list[Any] | None = None,
    least: list[Any] | None = None,
) -> Tensor:
    """Return [chosen, 3]: batch row, class and box, the best first; boxes that overlap a better one are dropped."""
    limit = int(most[0]) if most else 0
    edge, floor = (float(overlap[0]) if overlap else 0.0), (float(least[0]) if least else None)
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        raise Unsupported("a result whose size depends on values")
    corners = _corners(boxes, bool(node.get("center_point_box", 0)))
    chosen: list[list[int]] = []
    for row in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            for box in _kept(corners[row], scores[row, kind], limit, edge, floor):
                chosen.append([row, kind, box])
    return torch.tensor(chosen, dtype=torch.int64).reshape(-1, 3)


def _corners(boxes: Tensor, centred: bool) -> Tensor:
    if centred:
        x, y, w, h = boxes.unbind(-1)
        return torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b = boxes[..., :2], boxes[..., 2:]
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], -1)


def _kept(boxes: Tensor, scores: Tensor, limit: int, edge: float, floor: float | None) -> list[int]:
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    kept: list[int] = []
    for box in torch.argsort(scores, descending=True, stable=True).tolist():
        if len(kept) >= limit or (floor is not None and float(scores[box]) <= floor):
            break
        if kept:
            others = boxes[kept]
            low, high = (
                torch.maximum(others[:, :2], boxes[box, :2]),
                torch.minimum(others[:, 2:], boxes[box, 2:]),
            )
            shared = (high - low).clamp(min=0).prod(-1)
            union = areas[kept] + areas[box] - shared
            if bool(((shared / union) > edge)[union > 0].any()):
                continue
        kept.append(box)
    return kept


@operator("RoiAlign")
def roi_align(node: Node, x: Tensor, rois: Tensor, rows: Tensor) -> Tensor:
    """Sample boxes of an image [N, C, H, W] at a grid of places in each cell, bilinear."""
    half = (
        0.5
        if node.get(
            "coordinate_transformation_mode", "half_pixel" if node.version >= 16 else "output_half_pixel"
        )
        == "half_pixel"
        else 0.0
    )
    height, width, samples = (
        node.get("output_height", 1),
        node.get("output_width", 1),
        node.get("sampling_ratio", 0),
    )
    if samples <= 0:
        raise Unsupported("a number of samples that depends on the boxes")
    boxes = rois * node.get("spatial_scale", 1.0) - half
    start, extent = boxes[:, :2], boxes[:, 2:] - boxes[:, :2]
    extent = extent if half else extent.clamp(min=1.0)

    def places(first: Tensor, size: Tensor, cells: int) -> Tensor:
        at = (torch.arange(cells * samples) + 0.5) / (cells * samples)
        return first[:, None] + at[None, :] * size[:, None]  # [rois, cells * samples]

    xs, ys = places(start[:, 0], extent[:, 0], width), places(start[:, 1], extent[:, 1], height)
    images = x[rows.to(torch.int64)]
    found = _bilinear(images, ys, xs)
    parts = found.reshape(*found.shape[:2], height, samples, width, samples)
    if node.get("mode", "avg") == "avg":
        return parts.mean((3, 5))
    raise Unsupported("mode max")


def _bilinear(images: Tensor, ys: Tensor, xs: Tensor) -> Tensor:
    """Sample [rois, C, H, W] at rows ys and columns xs; more than one beyond the edge is 0."""

    def along(at: Tensor, size: int) -> Tensor:
        inside = (at >= -1) & (at <= size)
        held = at.clamp(0, size - 1)
        low = held.floor()
        share = held - low
        first = F.one_hot(low.to(torch.int64), size)
        second = F.one_hot((low + 1).clamp(max=size - 1).to(torch.int64), size)
        return (first * (1 - share)[..., None] + second * share[..., None]) * inside[..., None]

    down, across = along(ys, images.shape[2]).to(images.dtype), along(xs, images.shape[3]).to(images.dtype)
    return torch.einsum("rcij,rhi,rwj->rchw", images, down, across)


@operator("GridSample")
def grid_sample(node: Node, x: Tensor, grid: Tensor) -> Tensor:
    mode = {
        "bilinear": "bilinear",
        "linear": "bilinear",
        "nearest": "nearest",
        "bicubic": "bicubic",
        "cubic": "bicubic",
    }[node.get("mode", "bilinear")]
    if x.dim() != 4 and mode == "bicubic":
        raise Unsupported("cubic sampling of volumes")
    return F.grid_sample(x, grid, mode, node.get("padding_mode", "zeros"), bool(node.get("align_corners", 0)))


@operator("AffineGrid", sizes=(1,))
def affine_grid(node: Node, theta: Tensor, size: list[Any]) -> Tensor:
    return F.affine_grid(theta, size, bool(node.get("align_corners", 0)))
