"""Pages of sequences: found in the prefix cache, allocated as a sequence grows, shared, copied and released."""

from __future__ import annotations

from ..scheduling.engine_limits import EngineLimits
from ..sequence import Sequence
from .block_manager import BlockManager
from .state_rows import StateRows


class SequencePages:
    """The page list of each sequence, over the pages of `block_manager`; nothing here preempts another sequence."""

    def __init__(
        self, block_manager: BlockManager, limits: EngineLimits, state_rows: StateRows | None = None
    ) -> None:
        self.block_manager, self.limits, self.state_rows = block_manager, limits, state_rows

    def match_prefix(self, sequence: Sequence) -> list[int]:
        """Return cached pages of its beginning; at least one token is left to compute."""
        page, step = self.block_manager.page_size, self.limits.step_tokens
        if not self.block_manager.prefix_caching or sequence.state.needs_prompt_logprobs:
            return []
        full = (len(sequence.tokens) - 1) // page
        hits = self.block_manager.match_prefix(sequence.page_hash(block, page) for block in range(full))
        if self.limits.batch_invariant:
            del hits[len(hits) * page // step * step // page :]
        if self.state_rows is not None:
            del hits[self.state_rows.last_snapshot(sequence.page_hashes[: len(hits)]) :]
        return hits

    def num_needed(self, sequence: Sequence, hits: list[int]) -> int:
        """Count the pages that are no longer available once the sequence has pages for all its tokens."""
        return (
            -(-len(sequence.tokens) // self.block_manager.page_size)
            - len(hits)
            + sum(map(self.block_manager.is_evictable, hits))
            + -(-sequence.state.source_rows // self.block_manager.page_size)
        )

    def admit(self, sequence: Sequence, hits: list[int]) -> None:
        """Give a waiting sequence pages for all its tokens, the first of them from the prefix cache."""
        block_manager, page = self.block_manager, self.block_manager.page_size
        blocks = -(-len(sequence.tokens) // page)
        for hit in hits:
            block_manager.add_reference(hit)
        sequence.pages = [*hits, *(block_manager.allocate() for _ in range(blocks - len(hits)))]
        count = -(-sequence.state.source_rows // page)
        sequence.source_pages = [block_manager.allocate() for _ in range(count)]
        sequence.num_computed_tokens = sequence.num_cached_tokens = len(hits) * page
        if self.state_rows is not None and hits:
            self.state_rows.restore(sequence, sequence.page_hash(len(hits) - 1, page))

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Let `child` begin where `parent` is, over the same pages."""
        child.num_computed_tokens, child.page_hashes = parent.num_computed_tokens, list(parent.page_hashes)
        child.pages, child.source_pages = list(parent.pages), list(parent.source_pages)
        child.source_ready = parent.source_ready
        for page in (*child.pages, *child.source_pages):
            self.block_manager.add_reference(page)
        if self.state_rows is not None:
            self.state_rows.assign(child, parent.state_row)

    def use_cached(self, sequence: Sequence) -> int:
        """Replace own pages by those that another sequence with the same beginning has computed meanwhile.

        Returns the number of tokens that need not be computed any more.
        """
        block_manager, page = self.block_manager, self.block_manager.page_size
        if (
            not block_manager.prefix_caching
            or sequence.state.needs_prompt_logprobs
            or sequence.num_computed_tokens % page
        ):
            return 0
        first = sequence.num_computed_tokens // page
        blocks = range(first, (len(sequence.tokens) - 1) // page)
        known = block_manager.match_prefix(sequence.page_hash(block, page) for block in blocks)
        if self.state_rows is not None:
            end = first + len(known)
            del known[self.state_rows.last_snapshot(sequence.page_hashes[first:end]) :]
            if known:
                self.state_rows.restore(sequence, sequence.page_hashes[first + len(known) - 1])
        for block, shared in enumerate(known, first):
            if shared != sequence.pages[block]:
                block_manager.add_reference(shared)
                block_manager.release(sequence.pages[block])
                sequence.pages[block] = shared
                sequence.num_synced_pages = min(sequence.num_synced_pages, block)
        sequence.num_computed_tokens += len(known) * page
        sequence.num_cached_tokens += len(known) * page
        return len(known) * page

    def has_room(self, sequence: Sequence, length: int) -> bool:
        """Return True if `grow` to `length` tokens needs no more pages than are available."""
        return self._num_to_allocate(sequence, length) <= self.block_manager.num_available

    def _num_to_allocate(self, sequence: Sequence, length: int) -> int:
        """Count the pages needed so that `length` tokens fit and the next one is written to an unshared page."""
        pages, page = sequence.pages, self.block_manager.page_size
        block = sequence.num_computed_tokens // page
        shared = block < len(pages) and self.block_manager.ref_counts[pages[block]] > 1
        return -(-length // page) - len(pages) + shared

    def fits(self, sequence: Sequence, length: int) -> bool:
        """Return True if `length` tokens fit into its pages and the next one is written to an unshared page."""
        block_manager, page, pages = self.block_manager, self.block_manager.page_size, sequence.pages
        block = sequence.num_computed_tokens // page
        return (
            block < len(pages) and length <= len(pages) * page and block_manager.ref_counts[pages[block]] == 1
        )

    def grow(self, sequence: Sequence, length: int) -> None:
        """Allocate pages for `length` tokens, where `has_room`; a shared page that is written next is copied."""
        block_manager, page, pages = self.block_manager, self.block_manager.page_size, sequence.pages
        block = sequence.num_computed_tokens // page
        if block < len(pages):
            owned = block_manager.copy_on_write(pages[block])
            if owned != pages[block]:
                pages[block] = owned
                sequence.num_synced_pages = min(sequence.num_synced_pages, block)
        while len(pages) * page < length:
            pages.append(block_manager.allocate())

    def register(self, sequence: Sequence, first: int) -> None:
        """Add its full pages from page `first` on to the prefix cache."""
        page, end = self.block_manager.page_size, sequence.num_computed_tokens
        if self.limits.batch_invariant:  # of whole pieces only: other cuts may differ in the last bit
            step = self.limits.step_tokens
            end = min(end, sequence.state.prompt_length // step * step)
        for block in range(first, end // page):
            self.block_manager.register(sequence.pages[block], sequence.page_hash(block, page))

    def release_unused(self, sequence: Sequence) -> None:
        """Release pages beyond the computed tokens."""
        keep = -(-sequence.num_computed_tokens // self.block_manager.page_size)
        while len(sequence.pages) > keep:
            self.block_manager.release(sequence.pages.pop())
        sequence.num_synced_pages = min(sequence.num_synced_pages, keep)

    def release_all(self, sequence: Sequence) -> None:
        """Release all its pages, those of its source, and its row of the state cache."""
        self.block_manager.release_all(sequence.pages)
        self.block_manager.release_all(sequence.source_pages)
        sequence.source_ready = not sequence.state.source_rows
        if self.state_rows is not None:
            self.state_rows.stop(sequence)
