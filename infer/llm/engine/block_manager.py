"""Who holds which page of the KV cache: reference counts, prefix cache, copy on write.

A page is free (holds nothing), used (so many sequences hold it) or idle (nobody holds it, but its tokens are known
and may be asked for again; the one that was let go longest ago is taken first when no page is free).
"""

from __future__ import annotations

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ... import device as hardware
from ...errors import InferError, ResourceError
from ..step.paged_step import StepShape

ALIGNMENT = 64
CPU_SHARE, GPU_SHARE = 0.25, 0.85  # of the memory that is free
ENOUGH_TOKENS = 1 << 16  # on a CPU, where memory has other uses


def pages_for(budget_bytes: int, shape: StepShape) -> int:
    """How many pages, of all layers together, fit. Raises `ResourceError` when not one does."""
    pages = budget_bytes // (shape.layers * shape.page_bytes)
    if pages < 1:
        raise ResourceError(
            f"{budget_bytes} bytes hold no page of the KV cache: one has {shape.layers * shape.page_bytes}",
            hint="Give more memory",
        )
    return pages


def default_budget(shape: StepShape, device: str = "cpu") -> int:
    """Bytes: most of a GPU; of RAM a quarter of what is free, or what 65,536 tokens or one whole context take."""
    free = hardware.memory_available(device)
    if device != "cpu":
        return int(free * GPU_SHARE)
    enough = -(-max(ENOUGH_TOKENS, shape.max_positions) // shape.page) * shape.layers * shape.page_bytes
    return min(int(free * CPU_SHARE), enough)


def new_cache(shape: StepShape, pages: int, device: str = "cpu") -> Tensor:
    """uint8 [layers, pages, page_bytes] of zeros; RAM is taken when it is first written."""
    if device != "cpu":
        return shape.new_cache(pages, device)
    size = shape.layers * pages * shape.page_bytes
    block = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return torch.from_numpy(block[start : start + size]).view(shape.layers, pages, shape.page_bytes)


def chain(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The name of a full page: what is in it and in all before it."""
    return hashlib.sha256(parent + np.array(tokens, dtype=np.int64).tobytes()).digest()


def root(*marks: str) -> bytes:
    """What the chain starts with: pages of another adapter or salt are other pages."""
    return hashlib.sha256("\0".join(f"{len(mark)}:{mark}" for mark in marks).encode()).digest()


class PagePool:
    """Pages of `cache` uint8 [layers, pages, page_bytes], `page` tokens each."""

    def __init__(self, cache: Tensor, page: int, *, caching: bool = True) -> None:
        self.cache, self.page, self.caching = cache, page, caching
        self.total = cache.shape[1]
        self.refs = [0] * self.total
        self._names: list[bytes | None] = [None] * self.total
        self._known: dict[bytes, int] = {}
        self._free = list(range(self.total - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def available(self) -> int:
        return len(self._free) + len(self._idle)

    @property
    def used(self) -> int:
        return self.total - self.available

    @property
    def cached(self) -> int:
        """Pages whose tokens are known, held or idle."""
        return len(self._known)

    def take(self) -> int:
        """A page for one holder; look at `available` first."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._idle.popitem(last=False)
            self._forget(page)
            self.evictions += 1
        self.refs[page] = 1
        return page

    def share(self, page: int) -> None:
        if self.refs[page] == 0:
            del self._idle[page]
        self.refs[page] += 1

    def release(self, page: int) -> None:
        self.refs[page] -= 1
        if self.refs[page] > 0:
            return
        if self._names[page] is None:
            self._free.append(page)
        else:
            self._idle[page] = None

    def release_all(self, pages: list[int]) -> None:
        """The last first: of a prompt the beginning is likeliest to come again."""
        while pages:
            self.release(pages.pop())

    def name(self, page: int, name: bytes) -> None:
        """The page is full and will not be written again; of two pages alike the first is found."""
        if self.caching and name not in self._known and self._names[page] is None:
            self._known[name] = page
            self._names[page] = name

    def find(self, name: bytes) -> int | None:
        return self._known.get(name)

    def match(self, names: Iterable[bytes]) -> list[int]:
        """Pages of the longest run of names, from the first on, that are known; not yet held."""
        pages = []
        for name in names:
            page = self._known.get(name)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_idle(self, page: int) -> bool:
        return self.refs[page] == 0

    def own(self, page: int) -> int:
        """A page with the same content that only this holder holds: itself, or a copy of all layers."""
        if self.refs[page] == 1:
            return page
        copy = self.take()
        self.cache[:, copy].copy_(self.cache[:, page])
        self.release(page)
        return copy

    def _forget(self, page: int) -> None:
        name = self._names[page]
        if name is not None:
            del self._known[name]
            self._names[page] = None

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise `InferError` unless every page is free, idle or held by exactly these holders."""
        held = Counter(page for pages in holders for page in pages)
        wrong = [p for p in range(self.total) if self.refs[p] != held[p]]
        if wrong:
            page = wrong[0]
            raise InferError(
                f"page {page} is counted {self.refs[page]} times and held {held[page]} times; {len(wrong)} wrong"
            )
        places = Counter([*self._free, *self._idle, *held])
        if len(places) != self.total or any(count != 1 for count in places.values()):
            raise InferError("a page is missing from, or twice among, the free, idle and used ones")
        if any(self._names[page] is not None for page in self._free):
            raise InferError("a free page is named")
        if any(self._names[page] is None for page in self._idle):
            raise InferError("an idle page has no name")
        named = {name: page for page, name in enumerate(self._names) if name is not None}
        if named != self._known:
            raise InferError("the table of names and the pages differ")
