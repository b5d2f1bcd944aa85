"""Check that a model's attention mask is one of the paged operator: causal, in a window, in chunks or plain.

transformers gives a mask as a function of query and key position; it is evaluated far beyond the tokens at hand, since
a chunk or a window of thousands of tokens is invisible in a short run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

MaskFunction = Callable[[int, int, Tensor, Tensor], Tensor]
NUM_RANDOM = 4096
_MASKS: list[tuple[Tensor, MaskFunction]] = []


@contextlib.contextmanager
def recorded_masks(interface: str) -> Iterator[None]:
    """Let transformers build masks for the attention implementation `interface` and keep the function behind each."""
    from transformers import AttentionMaskInterface

    known: Any = AttentionMaskInterface
    AttentionMaskInterface.register(interface, _record)
    try:
        yield
    finally:
        known._global_mapping.pop(interface, None)
        _MASKS.clear()


def _record(
    *,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction,
    device: Any = None,
    **_: Any,
) -> Tensor:
    """Evaluate a mask function of transformers, bool [1, 1, q_length, kv_length], and keep it."""
    query = torch.arange(q_length, device=device)[:, None] + q_offset
    key = torch.arange(kv_length, device=device)[None, :] + kv_offset
    mask = torch.broadcast_to(mask_function(0, 0, query, key), (q_length, kv_length))[None, None].clone()
    _MASKS.append((mask, mask_function))
    return mask


def wrong_mask(mask: Tensor | None, window: int, chunk: int, longest: int) -> str | None:
    """Return the positions at which `mask` is not causal with this sliding window or chunk (0: none), or None.

    Pairs reach up to `longest` tokens for a mask that transformers built, else up to the mask's own size.
    """
    if mask is None:
        return None
    function = next((f for known, f in _MASKS if known is mask), None)
    query, key = _pairs(min(mask.shape[-2:]) if function is None else longest, window or chunk)
    if function is not None:
        allowed = function(0, 0, query, key)
    else:
        visible = mask if mask.dtype == torch.bool else mask >= 0
        allowed = visible[0, 0][query, key]
    expected = (key <= query) & (key > query - window if window else torch.tensor(True))
    if chunk:
        expected &= key >= query // chunk * chunk
    wrong = (torch.broadcast_to(allowed, expected.shape) != expected).nonzero()
    if not len(wrong):
        return None
    q, k = int(query[wrong[0]]), int(key[wrong[0]])
    return f"token {q} {'does not attend' if bool(expected[wrong[0]]) else 'attends'} to token {k}"


def _pairs(longest: int, window: int) -> tuple[Tensor, Tensor]:
    """Return positions of queries and keys below `longest`: near the diagonal, at the window's edge, and random."""
    seeded = torch.Generator().manual_seed(0)
    powers = [min(2**n, longest - 1) for n in range(longest.bit_length())]
    query = torch.cat([torch.tensor(powers), torch.randint(longest, (64,), generator=seeded)])
    near = torch.tensor([d for edge in (0, window) for d in (edge - 1, edge, edge + 1)])
    keys = query[:, None] - near
    far = torch.randint(longest, (2, NUM_RANDOM), generator=seeded)
    queries = torch.cat([query[:, None].expand_as(keys).flatten(), far[0]])
    keys = torch.cat([keys.flatten(), far[1]])
    inside = (keys >= 0) & (keys < longest)
    return queries[inside], keys[inside]
