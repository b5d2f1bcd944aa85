"""Resize and Upsample: every mode as lookups along one axis after the other, or torch's operator where equal."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .operators import Node, operator
from .values import Unsupported, is_static, whole


@operator("Upsample", "Resize", sizes=(1,))
def upsample(node: Node, x: Tensor, scales: list[float]) -> Tensor:
    """Resize as until opset 10."""
    sizes = [_scaled(n, s) for n, s in zip(x.shape, scales, strict=True)]
    options = {
        "mode": node.get("mode", "nearest"),
        "coordinate_transformation_mode": "asymmetric",
        "nearest_mode": "floor",
    }
    return _resize(options, x, list(range(x.dim())), list(scales), sizes, [])


@operator("Resize", since=11, sizes=(1, 2, 3))
def resize(
    node: Node,
    x: Tensor,
    roi: list[float] | None = None,
    scales: list[float] | None = None,
    sizes: list[Any] | None = None,
) -> Tensor:
    """Resize by scales or to sizes; `roi` only counts for tf_crop_and_resize."""
    options = dict(node.attributes)
    options.setdefault("coordinate_transformation_mode", "half_pixel")
    options.setdefault("nearest_mode", "round_prefer_floor")
    axes = [axis % x.dim() for axis in node.get("axes") or range(x.dim())]
    have = [x.shape[axis] for axis in axes]
    policy = node.get("keep_aspect_ratio_policy", "stretch")
    if sizes:
        wanted: list[Any] = list(sizes)
        if policy != "stretch":
            ratios = [w / h for w, h in zip(wanted, have, strict=True)]
            ratio = min(ratios) if policy == "not_larger" else max(ratios)
            factors: list[Any] = [ratio] * len(have)
            wanted = [int(ratio * h + 0.5) for h in have]
        else:
            factors = [w / h for w, h in zip(wanted, have, strict=True)]
    elif scales:
        factors = list(scales)
        wanted = [_scaled(h, f) for h, f in zip(have, factors, strict=True)]
        cut = any(is_static(h) and h * f != w for h, f, w in zip(have, factors, wanted, strict=True))
        if cut and options["coordinate_transformation_mode"] == "align_corners":
            raise Unsupported("align_corners with a part of a pixel, which runtimes compute differently")
    else:
        raise Unsupported("no scales and no sizes")
    return _resize(options, x, axes, factors, wanted, list(roi or []))


def _scaled(size: Any, scale: Any) -> Any:
    scale = whole(scale)
    if isinstance(scale, int):
        return size * scale
    return int(float(size) * scale) if is_static(size) else torch.sym_int(size * scale)


def _resize(
    options: dict[str, Any], x: Tensor, axes: list[int], scales: list[Any], sizes: list[Any], roi: list[float]
) -> Tensor:
    dtype = x.dtype
    if (fast := _by_torch(options, x, axes, scales, sizes)) is not None:
        return fast
    x = x if x.is_floating_point() or options.get("mode", "nearest") == "nearest" else x.float()
    extrapolated = options.get("coordinate_transformation_mode") == "tf_crop_and_resize"
    outside: Any = None
    for i, (axis, scale, size) in enumerate(zip(axes, scales, sizes, strict=True)):
        window = (roi[i], roi[len(axes) + i]) if roi and extrapolated else (0.0, 1.0)
        if is_static(scale) and scale == 1 and window == (0.0, 1.0):
            continue
        place = _places(options, x.shape[axis], size, scale, window)
        if extrapolated:
            shape = [1] * x.dim()
            shape[axis] = -1
            beyond = ((place < 0) | (place > x.shape[axis] - 1)).reshape(shape)
            outside = beyond if outside is None else outside | beyond
        x = _along(options, x, axis, place, scale)
    if outside is not None:
        x = torch.where(outside, torch.full((), options.get("extrapolation_value", 0.0), dtype=x.dtype), x)
    if x.dtype != dtype and not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        x = x.round().clamp(info.min, info.max) if options.get("mode") == "cubic" else x
    return x.to(dtype)


def _by_torch(
    options: dict[str, Any], x: Tensor, axes: list[int], scales: list[Any], sizes: list[Any]
) -> Tensor | None:
    """Use torch's operator for images whose scales are whole, which then has the same coordinates."""
    by_axis = dict(zip(axes, zip(scales, sizes, strict=True), strict=True))
    if (
        x.dim() != 4
        or not x.is_floating_point()
        or options.get("antialias", 0)
        or options.get("exclude_outside", 0)
    ):
        return None
    if any(not is_static(s) or s != 1 for axis, (s, _) in by_axis.items() if axis < 2):
        return None
    factors = [by_axis.get(axis, (1, x.shape[axis]))[0] for axis in (2, 3)]
    if not all(isinstance(whole(f), int) for f in factors):
        return None
    to = [by_axis.get(axis, (1, x.shape[axis]))[1] for axis in (2, 3)]
    kind = options.get("mode", "nearest"), options["coordinate_transformation_mode"]
    if kind == ("nearest", "asymmetric") and options["nearest_mode"] == "floor":
        return F.interpolate(x, to, mode="nearest")
    if kind in (("linear", "half_pixel"), ("linear", "pytorch_half_pixel")):
        return F.interpolate(x, to, mode="bilinear", align_corners=False)
    return (
        F.interpolate(x, to, mode="bilinear", align_corners=True)
        if kind == ("linear", "align_corners")
        else None
    )


def _places(options: dict[str, Any], have: Any, size: Any, scale: Any, window: tuple[float, float]) -> Tensor:
    """Return the coordinate in the input of each place of the output, float32 as in the specification's runtime."""
    at, how = torch.arange(size, dtype=torch.float32), options["coordinate_transformation_mode"]
    if how == "half_pixel":
        return (at + 0.5) / scale - 0.5
    if how == "half_pixel_symmetric":
        adjustment = size / (scale * have)
        centre = have / 2
        return centre * (1 - adjustment) + (at + 0.5) / scale - 0.5
    if how == "pytorch_half_pixel":
        return (at + 0.5) / scale - 0.5 if size > 1 else at * 0
    if how == "align_corners":
        return at * (have - 1) / (size - 1) if size > 1 else at * 0
    if how == "asymmetric":
        return at / scale
    if how == "tf_half_pixel_for_nn":
        return (at + 0.5) / scale
    if how == "tf_crop_and_resize":
        start, end = window
        if size > 1:
            return start * (have - 1) + at * ((end - start) * (have - 1) / (size - 1))
        return at * 0 + 0.5 * (start + end) * (have - 1)
    raise Unsupported(f"coordinate_transformation_mode {how}")


def _along(options: dict[str, Any], x: Tensor, axis: int, place: Tensor, scale: Any) -> Tensor:
    """Interpolate one axis at places of its input."""
    have, mode = x.shape[axis], options.get("mode", "nearest")
    if mode == "nearest":
        rounded = {
            "floor": torch.floor,
            "ceil": torch.ceil,
            "round_prefer_floor": lambda p: torch.ceil(p - 0.5),
            "round_prefer_ceil": lambda p: torch.floor(p + 0.5),
        }[options["nearest_mode"]](place)
        return x.index_select(axis, rounded.to(torch.int64).clamp(0, have - 1))
    first, weights = _filter(options, mode, place, scale)
    shape = [1] * x.dim()
    shape[axis] = -1
    taps = weights.shape[1]
    columns = first[:, None] + torch.arange(taps)
    if options.get("exclude_outside", 0):
        inside = (columns >= 0) & (columns < have)
        weights = torch.where(inside, weights, torch.zeros_like(weights))
        weights = weights / weights.sum(1, keepdim=True)
    columns = columns.clamp(0, have - 1)
    total: Any = 0
    for tap in range(taps):
        total = total + x.index_select(axis, columns[:, tap]) * weights[:, tap].to(x.dtype).reshape(shape)
    return total  # type: ignore[no-any-return]


def _filter(options: dict[str, Any], mode: str, place: Tensor, scale: Any) -> tuple[Tensor, Tensor]:
    """Return the first input of each output and the weights [outputs, taps] from there on."""
    shrinks = options.get("antialias", 0) and is_static(scale) and scale < 1
    stretch = float(scale) if shrinks else 1.0
    reach = 1 if mode == "linear" else 2
    if options.get("antialias", 0) and not is_static(scale):
        raise Unsupported("antialias with a symbolic scale")
    if not shrinks:
        first = place.floor().to(torch.int64) - (reach - 1)
        taps = 2 * reach
    else:
        first = (place - reach / stretch).ceil().to(torch.int64)
        taps = int(2 * reach / stretch) + 2
    away = (first[:, None] + torch.arange(taps)).to(torch.float32) - place[:, None]
    away = (away * stretch).abs()
    if mode == "linear":
        weights = (1 - away).clamp(min=0)
    elif mode == "cubic":
        a = options.get("cubic_coeff_a", -0.75)
        near = ((a + 2) * away - (a + 3)) * away * away + 1
        far = ((a * away - 5 * a) * away + 8 * a) * away - 4 * a
        weights = torch.where(away <= 1, near, torch.where(away < 2, far, torch.zeros_like(away)))
    else:
        raise Unsupported(f"mode {mode}")
    return first, weights / weights.sum(1, keepdim=True) if shrinks else weights
