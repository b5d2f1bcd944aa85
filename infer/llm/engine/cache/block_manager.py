"""Pages of the KV cache: allocation, reference counts, prefix cache, copy on write (vLLM calls a page a block).

A page is free (holds nothing), used (its count of references is the number of sequences that hold it) or evictable
(no sequence holds it, but its tokens are known and may be requested again; the least recently released one is reused
first when no page is free).
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .... import device as hardware
from ....errors import InferError, ResourceError

ALIGNMENT = 64  # bytes
CPU_SHARE, GPU_SHARE = 0.25, 0.85  # of the memory that is free
ENOUGH_TOKENS = 1 << 16  # on a CPU, where memory has other uses


def pages_for(budget_bytes: int, bytes_per_page: int) -> int:
    """Return how many pages fit; `bytes_per_page`: of all layers together. Raises `ResourceError` if none does."""
    pages = budget_bytes // bytes_per_page
    if pages < 1:
        raise ResourceError(
            f"the KV cache got {budget_bytes} bytes, but one page takes {bytes_per_page}",
            hint="Give more memory",
        )
    return pages


def default_budget(
    bytes_per_page: int, page_size: int, max_positions: int, device: str = "cpu", state_bytes: int = 0
) -> int:
    """Return the bytes of a KV cache for which no size was given.

    85 % of a GPU's free memory; of RAM 25 % of what is free, or the bytes of 65,536 tokens or of one whole context if
    that is less, and `state_bytes` besides. `page_size`: tokens of one page; `bytes_per_page`: of all layers together.
    """
    free = hardware.memory_available(device)
    if device != "cpu":
        return int(free * GPU_SHARE)
    enough = -(-max(ENOUGH_TOKENS, max_positions) // page_size) * bytes_per_page
    return min(int(free * CPU_SHARE), enough + state_bytes)


def new_cache(layers: int, pages: int, page_bytes: int, device: str = "cpu") -> Tensor:
    """Allocate zeros, uint8 [layers, pages, page_bytes]; the system maps RAM when it is first written."""
    if device != "cpu":
        return torch.zeros((layers, pages, page_bytes), dtype=torch.uint8, device=device)
    size = layers * pages * page_bytes
    block = np.zeros(size + ALIGNMENT, dtype=np.uint8)
    start = -block.ctypes.data % ALIGNMENT
    return torch.from_numpy(block[start : start + size]).view(layers, pages, page_bytes)


class BlockManager:
    """Allocator of the pages of `cache` uint8 [layers, pages, page_bytes], `page_size` tokens each."""

    def __init__(self, cache: Tensor, page_size: int, *, prefix_caching: bool = True) -> None:
        self.cache, self.page_size, self.prefix_caching = cache, page_size, prefix_caching
        self.num_pages = cache.shape[1]
        self.ref_counts = [0] * self.num_pages
        self._hashes: list[bytes | None] = [None] * self.num_pages
        self._page_of_hash: dict[bytes, int] = {}
        self._free = list(range(self.num_pages - 1, -1, -1))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return: free or evictable."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        """Number of pages that sequences hold."""
        return self.num_pages - self.num_available

    @property
    def num_cached(self) -> int:
        """Pages in the prefix cache, used or evictable."""
        return len(self._page_of_hash)

    def allocate(self) -> int:
        """Take a page with one reference; the caller checks `num_available` first."""
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            self._evict(page)
            self.evictions += 1
        self.ref_counts[page] = 1
        return page

    def add_reference(self, page: int) -> None:
        """Let one more sequence hold the page."""
        if self.ref_counts[page] == 0:
            del self._evictable[page]
        self.ref_counts[page] += 1

    def release(self, page: int) -> None:
        """Drop one reference; without any the page becomes evictable, or free when its hash is unknown."""
        self.ref_counts[page] -= 1
        if self.ref_counts[page] > 0:
            return
        if self._hashes[page] is None:
            self._free.append(page)
        else:
            self._evictable[page] = None

    def release_all(self, pages: list[int]) -> None:
        """Empty the list and release its pages, the last first: the beginning of a prompt is reused most often."""
        while pages:
            self.release(pages.pop())

    def register(self, page: int, page_hash: bytes) -> None:
        """Add a full page, which is not written again, to the prefix cache; of two equal pages the first stays."""
        if self.prefix_caching and page_hash not in self._page_of_hash and self._hashes[page] is None:
            self._page_of_hash[page_hash] = page
            self._hashes[page] = page_hash

    def match_prefix(self, page_hashes: Iterable[bytes]) -> list[int]:
        """Return the cached pages of the longest run of hashes from the first on; adds no references."""
        pages = []
        for page_hash in page_hashes:
            page = self._page_of_hash.get(page_hash)
            if page is None:
                break
            pages.append(page)
        return pages

    def is_evictable(self, page: int) -> bool:
        """Tell if no sequence holds the page."""
        return self.ref_counts[page] == 0

    def copy_on_write(self, page: int) -> int:
        """Return a page of the same content with a single reference: `page` itself, or a copy in all layers."""
        if self.ref_counts[page] == 1:
            return page
        copy = self.allocate()
        self.cache[:, copy].copy_(self.cache[:, page])
        self.release(page)
        return copy

    def _evict(self, page: int) -> None:
        page_hash = self._hashes[page]
        if page_hash is not None:
            del self._page_of_hash[page_hash]
            self._hashes[page] = None

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Raise `InferError` unless every page is free, evictable or held by exactly these holders."""
        held = Counter(page for pages in holders for page in pages)
        wrong = [p for p in range(self.num_pages) if self.ref_counts[p] != held[p]]
        if wrong:
            page = wrong[0]
            raise InferError(
                f"page {page} has {self.ref_counts[page]} references but {held[page]} holders; {len(wrong)} pages "
                "are wrong"
            )
        places = Counter([*self._free, *self._evictable, *held])
        if len(places) != self.num_pages or any(count != 1 for count in places.values()):
            raise InferError("a page is missing from, or twice among, the free, evictable and used ones")
        if any(self._hashes[page] is not None for page in self._free):
            raise InferError("a free page has a hash")
        if any(self._hashes[page] is None for page in self._evictable):
            raise InferError("an evictable page has no hash")
        hashed = {page_hash: page for page, page_hash in enumerate(self._hashes) if page_hash is not None}
        if hashed != self._page_of_hash:
            raise InferError("the prefix cache and the hashes of the pages differ")
