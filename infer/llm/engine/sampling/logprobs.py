"""Log probabilities under the model's own distribution: of chosen tokens, of prompts, of the most likely tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..requests import TokenLogprob
from . import sampler_cpu


def score(logits: Tensor, tokens: Sequence[int], numbers: Sequence[int]) -> list[TokenLogprob]:
    """Return the logprob of `tokens[i]` in row i of `logits`, and of its `numbers[i]` most likely tokens.

    `logits`: float32 [rows, vocab], on any device; natural logarithms, before temperature and truncation.
    """
    if logits.device.type == "cpu":
        return [sampler_cpu.score(*one) for one in zip(logits.numpy(), tokens, numbers, strict=True)]
    whole = logits.logsumexp(-1, keepdim=True)
    chosen = torch.tensor(tokens, device=logits.device)[:, None]
    own = (logits.gather(1, chosen) - whole)[:, 0].tolist()
    most = max(numbers, default=0)
    if not most:
        return [TokenLogprob(token, value) for token, value in zip(tokens, own, strict=True)]
    best = logits.topk(most, -1)
    ids, values = best.indices.tolist(), (best.values - whole).tolist()
    return [
        TokenLogprob(token, value, tuple(zip(ids[i][:number], values[i][:number], strict=True)))
        for i, (token, value, number) in enumerate(zip(tokens, own, numbers, strict=True))
    ]
