"""What of a budget plans may count on."""

from __future__ import annotations

# Share of a budget that plans leave to what the caching allocator cannot reuse.
HEADROOM_SHARE = 0.05


def usable(budget: int) -> int:
    """Bytes of a budget that plans may count on."""
    return budget - int(HEADROOM_SHARE * budget)


def budget_for(nbytes: int) -> int:
    """A budget of which plans may count on ``nbytes``."""
    return int(nbytes / (1 - HEADROOM_SHARE)) + 1
