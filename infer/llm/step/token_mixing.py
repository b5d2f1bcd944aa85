"""Search for layers that mix tokens outside of attention, whose state would be lost between the steps of a model.

A short convolution, a state space model, a gated delta rule or an RG-LRU reads earlier tokens from a state that no page
of the KV cache holds. The search is by behaviour, not by model type: attention is replaced by a function of each token
alone, one token is exchanged, and nothing may change at any other token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

NUM_TOKENS = 13  # a prime, so that an axis of this size is rarely anything else
CHANGED = 3  # the token that is exchanged: some before it, more after it
TOLERANCE = 1e-5  # of the largest magnitude: experts that see other row counts round differently


def sample_tokens(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return two int64 [NUM_TOKENS] that differ in token CHANGED only; ids below 3 (padding, begin) are unused."""
    room = max(vocab_size - 3, 1)
    tokens = (torch.arange(NUM_TOKENS) * 7) % room + min(3, vocab_size - 1)
    other = tokens.clone()
    other[CHANGED] = (int(tokens[CHANGED]) - 3 + room // 2) % room + min(3, vocab_size - 1)
    return tokens, other


def mixes(before: Tensor, after: Tensor) -> bool:
    """Return true if two outputs differ at a token other than CHANGED; False where no axis is tokens."""
    axes = [axis for axis, size in enumerate(before.shape) if size == NUM_TOKENS]
    if not axes or before.shape != after.shape or not before.dtype.is_floating_point:
        return False
    limit = TOLERANCE * float(before.abs().max().clamp(min=1e-30))
    changed = ~torch.isclose(before, after, rtol=TOLERANCE, atol=limit, equal_nan=True)
    others = torch.arange(NUM_TOKENS) != CHANGED
    return all(bool(changed.movedim(axis, 0)[others.to(changed.device)].any()) for axis in axes)


def mixing_module(model: nn.Module, run: Callable[[Tensor], object], tokens: Sequence[Tensor]) -> str:
    """Return name and class of the innermost module that mixes tokens.

    Its inputs differ at token CHANGED only, its output at others too. `run` calls the model on one of the two token
    rows.
    """
    names = {module: name for name, module in model.named_modules()}
    seen: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []

    def record(module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        given = [tensor.clone() for tensor in _tensors((args, dict(kwargs)))]
        seen.append((module, given, [tensor.clone() for tensor in _tensors(output)]))

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in names]
    try:
        run(tokens[0])
        first, seen = seen, []
        run(tokens[1])
    finally:
        for hook in hooks:
            hook.remove()
    for (module, given, output), (_, other_given, other_output) in zip(first, seen, strict=False):
        if _any_mixes(output, other_output) and not _any_mixes(given, other_given):
            return f"{names[module] or 'the model'} ({type(module).__name__})"
    return f"the model ({type(model).__name__})"


def _any_mixes(before: Sequence[Tensor], after: Sequence[Tensor]) -> bool:
    return any(mixes(a, b) for a, b in zip(before, after, strict=False))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for part in value.values() for tensor in _tensors(part)]
    if isinstance(value, tuple | list):
        return [tensor for part in value for tensor in _tensors(part)]
    return []
