"""The memory statistics of a device."""

from __future__ import annotations

import torch


class Allocator:
    """torch's caching allocator for a GPU.  On a CPU, all results are None, because torch does not count allocated bytes."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def begin(self) -> None:
        """Reset the peak to the bytes that are allocated now."""
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> int | None:
        """Return the peak number of allocated bytes since ``begin``."""
        return None if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)

    def reserved(self) -> int | None:
        """Return the number of bytes that the allocator has reserved on the device, including cached but unused bytes."""
        return None if self._gpu is None else torch.cuda.memory_reserved(self._gpu)

    def trim(self) -> None:
        """Return cached but unused memory to the device."""
        if self._gpu is not None:
            torch.cuda.empty_cache()
