"""Progress on stderr: of moving a model's weights, and of planning.

Shown on a terminal only, and not with ``CHUNKFLOW_PROGRESS=0`` in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

# A small model moves in less; a bar that flashes by tells nothing.
DELAY_S = 1.0


def _disabled() -> bool | None:
    """For tqdm: None disables a bar where stderr is no terminal."""
    return True if os.environ.get("CHUNKFLOW_PROGRESS") == "0" else None


@contextlib.contextmanager
def moving(what: str, nbytes: int, expected: str = "") -> Iterator[Callable[[int], object]]:
    """A bar over ``nbytes``, shown once it has taken DELAY_S.  The context gets a function to call with the bytes of each
    weight, after it.  ``expected``: how long it is going to take, in words; then the bar is shown at once."""
    with tqdm(
        total=nbytes,
        desc=f"chunkflow: {what}{expected and f', {expected}'}",
        unit="B",
        unit_scale=True,
        delay=0 if expected else DELAY_S,
        leave=False,
        disable=_disabled(),
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def planning(what: str) -> Iterator[None]:
    """One line while a step waits for a plan."""
    with line(f"chunkflow: planning {what}"):
        yield


def line(text: str = "") -> tqdm[Any]:
    """A line with the time that has passed."""
    return tqdm(bar_format="{desc} {elapsed}", desc=text, leave=False, disable=_disabled(), mininterval=0)
