"""Training of the language model of pydoc_lm.py on a CPU within a fixed time.

The schedule follows the clock, not the step count: warm-up, then a cosine down to zero when the minutes are
over, so a run always ends annealed however busy the machine is. Hidden matrices are trained by Muon (Jordan
et al. 2024: momentum, orthogonalised by a Newton-Schulz iteration), everything else by AdamW.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WARM_UP = 0.03
CHECKPOINT_EVERY_S = 180.0


class Muon(torch.optim.Optimizer):
    """Momentum SGD whose update is made orthogonal; parameters of one shape are iterated together."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for param in group["params"]:
                by_shape.setdefault(param.shape, []).append(param)
            for shape, params in by_shape.items():
                updates = orthogonal(
                    torch.stack([self._velocity(each, group["momentum"]) for each in params])
                )
                scale = group["lr"] * 0.2 * math.sqrt(max(shape))
                for param, update in zip(params, updates, strict=True):
                    param.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)

    def _velocity(self, param: nn.Parameter, momentum: float) -> Tensor:
        state = self.state[param]
        buffer = state.setdefault("momentum", torch.zeros_like(param))
        buffer.lerp_(param.grad, 1 - momentum)
        return torch.lerp(param.grad, buffer, momentum)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Return the nearest semi-orthogonal matrix of each, roughly: [n, rows, cols] float32 in and out."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / (x.flatten(1).norm(dim=1)[:, None, None] + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + torch.baddbmm(gram, gram, gram, beta=b, alpha=c) @ x
    return x.mT if tall else x


def make_optimizers(model: nn.Module, decay: float = 0.1) -> list[torch.optim.Optimizer]:
    hidden = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    table = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" in name]
    gains = [p for p in model.parameters() if p.ndim == 1]
    adam = [{"params": table, "weight_decay": decay}, {"params": gains, "weight_decay": 0.0}]
    return [
        Muon(hidden, lr=4e-3, momentum=0.95, weight_decay=decay),
        torch.optim.AdamW(adam, lr=3e-3, betas=(0.9, 0.95), eps=1e-10),
    ]


def schedule(done: float) -> float:
    """Return the share of the peak learning rate after this share of the time: warm-up, then cosine to zero."""
    if done < WARM_UP:
        return (done + 1e-3) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP))))


def batches(documents: list[tuple[list[int], int]], batch: int, seq: int, seed: int) -> Iterator[Tensor]:
    """Yield endless int64 [batch, seq + 1] from (token ids, times per epoch), packed anew each epoch."""
    generator = torch.Generator().manual_seed(seed)
    repeated = [torch.tensor(ids) for ids, times in documents for _ in range(times)]
    while True:
        order = torch.randperm(len(repeated), generator=generator).tolist()
        stream = torch.cat([repeated[each] for each in order])
        stream = stream[int(torch.randint(seq, (1,), generator=generator)) :]
        rows = stream[: len(stream) // (seq + 1) * (seq + 1)].view(-1, seq + 1)
        rows = rows[torch.randperm(len(rows), generator=generator)]
        yield from rows[: len(rows) // batch * batch].view(-1, batch, seq + 1)


def train_for(
    model: nn.Module,
    documents: list[tuple[list[int], int]],
    minutes: float,
    folder: Path,
    measure: Callable[[], float],
    batch: int = 16,
    seq: int = 256,
) -> dict[str, Any]:
    """Train in place; checkpoints land in `folder` and a run that was cut off goes on from the last one."""
    optimizers = make_optimizers(model)
    log = _resume(model, optimizers, folder) or {"steps": 0, "tokens": 0, "seconds": 0.0}
    peaks = [[group["lr"] for group in each.param_groups] for each in make_optimizers(model)]
    loss_of = torch.compile(lambda ids: _loss(model, ids))
    start, saved = time.monotonic() - log["seconds"], time.monotonic()
    smooth = None
    for ids in batches(documents, batch, seq, seed=log["steps"]):
        log["seconds"] = time.monotonic() - start
        if log["seconds"] >= minutes * 60:
            break
        _set_rates(optimizers, peaks, schedule(log["seconds"] / (minutes * 60)))
        loss = loss_of(ids)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=True)
        log["steps"] += 1
        log["tokens"] += ids.shape[0] * seq
        smooth = loss.item() if smooth is None else 0.95 * smooth + 0.05 * loss.item()
        if log["steps"] % 20 == 0:
            print(json.dumps(log | {"loss": round(smooth, 4)}), flush=True)
        if time.monotonic() - saved > CHECKPOINT_EVERY_S:
            print(json.dumps({"steps": log["steps"], "held_out_perplexity": round(measure(), 2)}), flush=True)
            _save(model, optimizers, log, folder)
            saved = time.monotonic()
    return log


def _loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def _set_rates(optimizers: list[torch.optim.Optimizer], peaks: list[list[float]], share: float) -> None:
    for optimizer, rates in zip(optimizers, peaks, strict=True):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share


def _save(model: nn.Module, optimizers: list[torch.optim.Optimizer], log: dict, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "model": model.state_dict(),
        "optimizers": [each.state_dict() for each in optimizers],
        "log": log,
    }
    torch.save(state, folder / "last.tmp")
    (folder / "last.tmp").replace(folder / "last.pt")


def _resume(model: nn.Module, optimizers: list[torch.optim.Optimizer], folder: Path) -> dict[str, Any] | None:
    if not (folder / "last.pt").exists():
        return None
    state = torch.load(folder / "last.pt", weights_only=True)
    model.load_state_dict(state["model"])
    for each, saved in zip(optimizers, state["optimizers"], strict=True):
        each.load_state_dict(saved)
    return state["log"]
