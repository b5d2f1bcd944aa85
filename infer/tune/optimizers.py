"""Optimizers by name: AdamW, AdamW with 8-bit states (bitsandbytes), Muon for matrices."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from ..distribution import install
from ..library_errors import quiet
from ..spec import Finding
from .settings import TrainSettings

BETAS, EPSILON = (0.9, 0.95), 1e-8
NAMES_8BIT = {"adamw8bit": "AdamW8bit", "paged-adamw8bit": "PagedAdamW8bit"}


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, each once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def build_optimizers(
    model: nn.Module, settings: TrainSettings, device: str = "cpu"
) -> tuple[list[torch.optim.Optimizer], list[Finding]]:
    """Build the optimizers of the trainable parameters, and say where another one than asked for is used.

    Matrices get the weight decay, vectors none. With muon, matrices of hidden layers go to `torch.optim.Muon` and the
    rest, embeddings and the output layer among them, to AdamW.
    """
    named = trainable(model)
    hidden = set(_hidden_matrices(model)) if settings.optimizer == "muon" else set()
    rest = [parameter for name, parameter in named.items() if name not in hidden]
    found: list[torch.optim.Optimizer] = []
    if hidden:
        found.append(
            torch.optim.Muon(
                [named[name] for name in named if name in hidden],
                lr=settings.learning_rate,
                weight_decay=settings.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    findings: list[Finding] = []
    if rest:
        kind, findings = _adamw(settings.optimizer, device)
        found.append(kind(_groups(rest, settings), lr=settings.learning_rate, betas=BETAS, eps=EPSILON))
    return found, findings


def missing_8bit(name: str, device: str) -> str | None:
    """Say why an optimizer with 8-bit states can't be used on this device; None where it can."""
    if find_spec("bitsandbytes") is None:
        return f"bitsandbytes is not installed ({install('tune')})"
    if name.startswith("paged") and not device.startswith("cuda"):
        return f"states are paged between a GPU and RAM, and this runs on {device}"
    return None


def _adamw(name: str, device: str) -> tuple[Any, list[Finding]]:
    """Return the optimizer's class, the nearest usable one, and a finding where it is not the one asked for."""
    findings: list[Finding] = []
    while name in NAMES_8BIT and (why := missing_8bit(name, device)):
        name = "adamw8bit" if name.startswith("paged") else "adamw"
        findings.append(Finding("train", "optimizer", name, why=why))
    if name not in NAMES_8BIT:
        return partial(torch.optim.AdamW, fused=True), findings
    with quiet():  # its import names kernels of other parts that are not installed
        import bitsandbytes
    return getattr(bitsandbytes.optim, NAMES_8BIT[name]), findings


def _groups(parameters: Iterable[nn.Parameter], settings: TrainSettings) -> list[dict[str, Any]]:
    parameters = list(parameters)
    decayed = [each for each in parameters if each.dim() >= 2]
    others = [each for each in parameters if each.dim() < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of trainable matrices that are no embedding and no output layer."""
    outer = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters(recurse=False)
    }
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer |= {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    named = trainable(model).items()
    return [name for name, parameter in named if parameter.dim() == 2 and id(parameter) not in outer]
