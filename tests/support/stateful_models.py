"""Small models that carry state, and what calling them by hand with that state gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from infer import Plan, optimize

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.rnn, self.head = nn.LSTM(8, 16, 2, batch_first=True), nn.Linear(16, 3)

    def forward(self, x, h, c):
        y, (h, c) = self.rnn(x, (h, c))
        return self.head(y[:, -1]), h, c

class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv1d(4, 4, 3)

    def forward(self, x, cache):
        whole = torch.cat([cache, x], 2)
        return {"y": self.conv(whole), "next_cache": whole[:, :, -2:]}

def lstm(): return Net().eval()
def stream(): return Filter().eval()
"""
LSTM = ("x=float32[batch,5,8]", "h=float32[2,batch,16]", "c=float32[2,batch,16]")
STREAM = ("x=float32[batch,4,6]", "cache=float32[batch,4,2]")


def make(place: Path, name: str, **more: object) -> Path:
    """Optimize the `lstm` or the `stream` of `SOURCE` into `place`; return the artifact."""
    (place / "nets.py").write_text(SOURCE)
    inputs = {"lstm": LSTM, "stream": STREAM}[name]
    plan = {"backend": "eager", "inputs": inputs, "batches": (), "max_batch": 8, "allow_slower": True, **more}
    out = place / f"{name}.infer"
    optimize(Plan(source=f"{place}/nets.py:{name}", **plan), out, replace=True)  # type: ignore[arg-type]
    return out


def pieces(seed: int, count: int, rows: int = 1) -> list[np.ndarray]:
    """Return the pieces of one sequence for `lstm`: float32 [rows, 5, 8] each."""
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((rows, 5, 8), np.float32) for _ in range(count)]


def by_hand(xs: list[np.ndarray]) -> list[np.ndarray]:
    """Call the user's own `lstm` on the pieces, with the state carried from call to call."""
    space: dict[str, object] = {}
    exec(SOURCE, space)  # noqa: S102
    module: nn.Module = space["lstm"]()  # type: ignore[operator]
    h: Tensor = torch.zeros(2, len(xs[0]), 16)
    c, found = torch.zeros_like(h), []
    with torch.no_grad():
        for x in xs:
            y, h, c = module(torch.from_numpy(x), h, c)
            found.append(y.numpy())
    return found
