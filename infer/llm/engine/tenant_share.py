"""The part of a bounded queue that one tenant may have. No torch: the server's front imports this."""

from __future__ import annotations


def is_beyond_share(own: int, total: int, tenants: int, limit: int) -> bool:
    """Tell if a tenant may add nothing to a queue: it is full, and the tenant has its part or the overflow is used."""
    return total > limit and (own * tenants > limit or total > 2 * limit)
