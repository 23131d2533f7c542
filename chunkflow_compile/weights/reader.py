"""The protocol by which the host store knows the devices that copy from it; the devices are in ``runtime``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class HostReader(Protocol):
    """A device whose copies read host memory.  ``closed``: whether its streams are closed."""

    name: str
    closed: bool

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Let the copy engine read a host tensor directly; return a function to undo it.  Raises OSError on failure."""

    def sync_copies(self) -> None:
        """Wait for the copies that delivered steps read: after that the host may write to their source."""
