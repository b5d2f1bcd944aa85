"""Weights that are kept together: the same numbers, each tensor for itself."""

from __future__ import annotations

import io

import torch

from infer.kernels.cpu.large_pages import ALIGNMENT, ALONE, BLOCK, LargePages


def test_tensors_in_large_pages_are_contiguous_and_unchanged() -> None:
    memory, generator = LargePages(), torch.Generator().manual_seed(0)
    given = [
        [torch.randint(-128, 128, (rows, 3, 5), dtype=torch.int8, generator=generator) for rows in (7, 2)],
        [torch.randn(4, 16, generator=generator)],
        [torch.empty(0, 8)],
        [torch.randint(0, 256, (1, 33), dtype=torch.uint8, generator=generator)],
        [torch.randn(2, 16, generator=generator), torch.randn(1, 16, generator=generator)],
    ]
    kept = [memory.keep(parts) for parts in given]
    for parts, tensor in zip(given, kept, strict=True):
        assert tensor.dtype == parts[0].dtype
        assert torch.equal(tensor, torch.cat(parts))
    places = [tensor.data_ptr() for tensor in kept if tensor.numel()]
    assert all(place % ALIGNMENT == 0 for place in places)
    assert places == sorted(places)
    assert places[-1] - places[0] < 4096


def test_a_tensor_is_stored_without_its_neighbours() -> None:
    memory = LargePages()
    memory.keep([torch.zeros(1 << 20)])
    file = io.BytesIO()
    torch.save(memory.keep([torch.ones(4)]), file)
    assert len(file.getvalue()) < 4096


def test_a_large_tensor_is_not_copied() -> None:
    large = torch.empty(ALONE, dtype=torch.uint8)
    assert LargePages().keep([large]) is large


def test_large_pages_grow_beyond_one_block() -> None:
    memory = LargePages()
    parts = [torch.full((ALONE - 1,), number, dtype=torch.uint8) for number in range(4)]
    kept = [memory.keep([part]) for part in parts] + [memory.keep([parts[0], parts[1], parts[2]])]
    assert sum(tensor.nbytes for tensor in kept) > 2 * BLOCK
    assert [int(tensor[0]) for tensor in kept] == [0, 1, 2, 3, 0]
    assert [int(tensor[-1]) for tensor in kept] == [0, 1, 2, 3, 2]
