"""What a device tells of its memory."""

from __future__ import annotations

import torch


class Allocator:
    """torch's caching allocator of a GPU.  On a CPU, whose activations nothing counts, its figures are None."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device if device.type == "cuda" else None

    def begin(self) -> None:
        """Forget the peak so far."""
        if self._gpu is not None:
            torch.cuda.reset_peak_memory_stats(self._gpu)

    def peak(self) -> int | None:
        """Most bytes allocated since ``begin``."""
        return None if self._gpu is None else torch.cuda.max_memory_allocated(self._gpu)

    def reserved(self) -> int | None:
        """Bytes that it has from the device, those that nothing uses included."""
        return None if self._gpu is None else torch.cuda.memory_reserved(self._gpu)

    def trim(self) -> None:
        """Give unused memory back to the device."""
        if self._gpu is not None:
            torch.cuda.empty_cache()
