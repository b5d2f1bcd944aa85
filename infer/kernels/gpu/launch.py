"""Launch of Triton kernels: direct or traced, on the device of their tensors, with enough programs."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import wrap_triton

LARGEST_GRID = 65535  # programs on the second and the third axis of a grid; the first takes 2**31 - 1
_MOST_TICKETS = 1 << 16
# The kernels take activations in these types; others are converted to float32 first.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
HALVES = (torch.float16, torch.bfloat16)  # what tensor cores multiply
HALF = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of kernels that read x as 32-bit words


def launch(kernel: Any, grid: Sequence[int], *args: Any, **options: Any) -> None:
    """Run `kernel` on `grid`; nothing happens when the grid is empty.

    A compiler that traces the call (torch.export, AOTInductor) sees the kernel itself, not an opaque operator, and
    embeds it in what it makes.
    """
    if 0 in grid:
        return
    if any(isinstance(size, int) and size > LARGEST_GRID for size in grid[1:]):
        raise RuntimeError(
            f"a grid of {list(grid)} programs: CUDA takes {LARGEST_GRID} on its second and third axis"
        )
    tensor: Tensor = args[0]
    if type(tensor) not in (Tensor, nn.Parameter):  # fake or functional: a compiler is tracing
        wrap_triton(kernel)[tuple(grid)](*args, **options)
        return
    with _on(tensor.device):
        kernel[tuple(grid)](*args, enable_fp_fusion=True, **options)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 elsewhere (Triton's interpreter runs one program at a time)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def cdiv(number: int, divisor: int) -> int:
    """Divide integers, rounding up."""
    return -(-number // divisor)


_TICKETS: dict[tuple[torch.device, int], Tensor] = {}


def tickets(tensor: Tensor, count: int) -> Tensor | None:
    """Return int32 counters [count] at 0, by which the programs of a kernel determine the last one to finish.

    The last one sets its own back to zero. There is a set for each stream, whose kernels do not overlap. None while a
    compiler traces, or where more are wanted than a set has.
    """
    if type(tensor) not in (Tensor, nn.Parameter) or count > _MOST_TICKETS:
        return None
    on_gpu = tensor.device.type == "cuda"
    key = (tensor.device, torch.cuda.current_stream(tensor.device).cuda_stream if on_gpu else 0)
    if key not in _TICKETS:
        made = torch.zeros(_MOST_TICKETS, dtype=torch.int32, device=tensor.device)
        if on_gpu and torch.cuda.is_current_stream_capturing():
            return made  # the graph's own memory, which the graph sets to zero
        _TICKETS[key] = made
    return _TICKETS[key]


def same_device(x: Tensor, *others: Tensor | None) -> None:
    """Raise RuntimeError unless all tensors are where x is."""
    for tensor in others:
        if tensor is not None and tensor.device != x.device:
            raise RuntimeError(f"x is on {x.device}, a weight on {tensor.device}: move one of them")


def flat_rows(x: Tensor) -> Tensor:
    """[..., K] → contiguous [M, K], in a type the kernels take."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return (rows if rows.dtype in FLOATS else rows.float()).contiguous()


def words(tensor: Tensor) -> Tensor:
    """Return the same bytes as int32; copied first if they don't start at a multiple of 16."""
    tensor = tensor.contiguous()
    aligned = tensor.storage_offset() * tensor.element_size() % 16 == 0
    return (tensor if aligned else tensor.clone()).view(torch.int32)
