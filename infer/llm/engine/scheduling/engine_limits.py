"""Limits of an engine: tokens and sequences of a step, lengths of queues, and a tenant's share of a queue.

No torch: the server's front end imports this.
"""

from __future__ import annotations

import msgspec

from ....errors import UsageError

MAX_TOKENS, MAX_SEQUENCES = 16384, 1024  # of one step, in every captured graph

GPU_LIMITS = (2048, 512, 256)  # step_tokens, mixed_tokens, max_running
LARGE_GPU = 24 << 30  # bytes; with less the pages of 256 sequences leave little for each
FEW_SMS = 64  # streaming multiprocessors; fewer are filled by fewer tokens


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine.

    `batch_invariant`: each sequence runs in calls of its own and its prompt in chunks of fixed size, so that its tokens
    are bit-identical whatever else runs (with kernels that are deterministic); slower, as nothing is batched.
    """

    step_tokens: int = 512  # of one step
    mixed_tokens: int = 128  # of prompts, in a step that also decodes: bounds the wait between two tokens
    score_tokens: int = 128  # of prompts whose tokens are scored, in one step: each takes a row of logits
    max_running: int = 64  # sequences that hold pages
    max_prefills: int = 8  # prompts that are under way together
    max_queued: int = 1024  # requests waiting
    max_queued_tokens: int = 1 << 20  # of their prompts
    max_draft: int = 16  # guessed tokens of one sequence in one step
    aging: float = 30.0  # seconds of waiting that are worth one step of priority
    watermark: float = 0.01  # share of pages that stays free when a sequence is admitted beside others
    prefix_cache: bool = True
    batch_invariant: bool = False

    def check(self, page: int) -> None:
        """Raise `UsageError` for limits that contradict each other; `page`: tokens of one."""
        for name in ("step_tokens", "mixed_tokens", "score_tokens", "max_running", "max_prefills"):
            if getattr(self, name) < 1:
                raise UsageError(f"expected {name} of at least 1, got {getattr(self, name)}")
        if self.max_running > self.step_tokens:
            raise UsageError(
                f"{self.max_running} sequences can't decode in steps of {self.step_tokens} tokens",
                hint="Raise step_tokens or lower max_running",
            )
        if self.step_tokens > MAX_TOKENS or self.max_running > MAX_SEQUENCES:
            raise UsageError(f"a step has at most {MAX_TOKENS} tokens of {MAX_SEQUENCES} sequences")
        if self.batch_invariant and self.step_tokens % page:
            raise UsageError(f"batch_invariant needs step_tokens divisible by the page of {page} tokens")


def default_limits(device: str) -> EngineLimits:
    """Return the limits for a device: of a GPU from its memory and the number of its multiprocessors.

    A GPU reads its weights once for a step of any size, and is filled by a few thousand tokens; CUDA graphs are
    recorded for up to 256 sequences.
    """
    if not device.startswith("cuda"):
        return EngineLimits()
    import torch

    found = torch.cuda.get_device_properties(torch.device(device))
    tokens, mixed, running = GPU_LIMITS
    if found.multi_processor_count < FEW_SMS:
        tokens, mixed = tokens // 2, mixed // 2
    if found.total_memory < LARGE_GPU:
        running //= 2
    return EngineLimits(step_tokens=tokens, mixed_tokens=mixed, max_running=running)


def is_beyond_share(own: int, total: int, tenants: int, limit: int) -> bool:
    """Return true if a full queue refuses a tenant: it has its share, or the overflow for others is used up."""
    return total > limit and (own * tenants > limit or total > 2 * limit)
