"""The share of a memory budget that plans may use."""

from __future__ import annotations

# The fraction of a budget that plans leave free, for memory that the caching allocator cannot reuse.
HEADROOM_SHARE = 0.05


def usable(budget: int) -> int:
    """Return the bytes of a budget that plans may use."""
    return budget - int(HEADROOM_SHARE * budget)


def budget_for(nbytes: int) -> int:
    """Return a budget, in bytes, that lets plans use ``nbytes``."""
    return int(nbytes / (1 - HEADROOM_SHARE)) + 1
