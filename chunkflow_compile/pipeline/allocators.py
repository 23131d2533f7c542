"""Memory statistics of a device."""

from __future__ import annotations

import torch


class Allocator:
    """The caching allocator of torch for a GPU.  On a CPU nothing counts the activations, so its figures are None."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def begin(self) -> None:
        """Reset the peak."""
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> int | None:
        """The maximum bytes allocated since ``begin``."""
        return None if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)

    def reserved(self) -> int | None:
        """Bytes that the allocator has reserved on the device, including unused ones."""
        return None if self._gpu is None else torch.cuda.memory_reserved(self._gpu)

    def trim(self) -> None:
        """Return unused memory to the device."""
        if self._gpu is not None:
            torch.cuda.empty_cache()
