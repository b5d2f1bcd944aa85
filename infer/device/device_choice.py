"""The device of a plan: auto, cpu, cuda or cuda:N, resolved against the GPUs that are there."""

from __future__ import annotations

import re

import torch

from ..errors import NotUsableError, unknown
from ..spec import Choice


def resolve(device: str) -> Choice:
    """Resolve auto, cpu, cuda or cuda:N to a device, with the reason.

    Raises `UsageError` for an unknown name and `NotUsableError` for a CUDA device that is not there.
    """
    if device == "auto":
        reason = _no_cuda()
        if reason is None:
            return Choice("device", device, "cuda", f"found {torch.cuda.get_device_name(0)}")
        return Choice("device", device, "cpu", reason)
    if device == "cpu":
        return Choice("device", device, "cpu", "asked for")
    match = re.fullmatch(r"cuda(?::(\d+))?", device)
    if match is None:
        raise unknown("device", device, ("auto", "cpu", "cuda"))
    reason = _no_cuda()
    if reason is None and int(match[1] or 0) >= torch.cuda.device_count():
        reason = f"it has {torch.cuda.device_count()} CUDA devices, numbered from 0"
    if reason is not None:
        raise NotUsableError(
            f"device {device} is not usable on this machine: {reason}",
            hint="Use --device cpu, or run 'infer doctor'",
        )
    return Choice("device", device, device, "asked for")


def _no_cuda() -> str | None:
    if torch.cuda.is_available():
        return None
    return "no CUDA device" if torch.version.cuda else "this build of torch is for CPUs only"
