"""What the host store asks of a device that copies from it; the devices themselves are in ``runtime``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch


class HostReader(Protocol):
    """A device whose copies read host memory.  ``closed``: whether nothing runs on it any more."""

    name: str
    closed: bool

    def pin(self, host: torch.Tensor) -> Callable[[], None]:
        """Lets the copy engine read a host tensor directly; returns what undoes it.  Raises OSError if it cannot."""

    def settle(self) -> None:
        """Returns when the copies that delivered steps read are done: the host may write to their source."""
