"""What a device tells of its memory: torch's caching allocator of a GPU; nothing on a CPU."""

from __future__ import annotations

from typing import Protocol

import torch


class Allocator(Protocol):
    """What a device tells of its memory."""

    def begin(self) -> None:
        """Forget the peak so far."""

    def peak(self) -> int | None:
        """Most bytes allocated since ``begin``; None where nothing counts them."""

    def reserved(self) -> int | None:
        """Bytes that it has from the device, those that nothing uses included; None where nothing counts them."""

    def trim(self) -> None:
        """Give unused memory back to the device."""


class CudaAllocator:
    """torch's caching allocator of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)

    def reserved(self) -> int | None:
        return torch.cuda.memory_reserved(self._device)

    def trim(self) -> None:
        torch.cuda.empty_cache()


class Uncounted:
    """A CPU, whose activations nothing counts."""

    def begin(self) -> None:
        pass

    def peak(self) -> int | None:
        return None

    def reserved(self) -> int | None:
        return None

    def trim(self) -> None:
        pass


def allocator_of(device: torch.device) -> Allocator:
    """That of a device."""
    return CudaAllocator(device) if device.type == "cuda" else Uncounted()
