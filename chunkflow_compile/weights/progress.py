"""Progress of moving a model's weights, on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tqdm import tqdm

# A small model moves in less; a bar that flashes by tells nothing.
DELAY_S = 1.0


@contextlib.contextmanager
def moving(what: str, nbytes: int) -> Iterator[Callable[[int], object]]:
    """A bar over ``nbytes``, shown on a terminal once it has taken DELAY_S.  The context gets a function to call with the
    bytes of each weight."""
    with tqdm(
        total=nbytes, desc=f"chunkflow: {what}", unit="B", unit_scale=True, delay=DELAY_S, leave=False, disable=None
    ) as bar:
        yield bar.update
