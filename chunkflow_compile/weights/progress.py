"""Progress on stderr: of moving a model's weights, of planning and of compiling.

Shown on a terminal only, and not with ``CHUNKFLOW_PROGRESS=0`` in the environment.  What a log should keep is logged at INFO.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

# A small model moves in less; a bar that flashes by tells nothing.
DELAY_S = 1.0
# Seconds between two updates of the time in a line.
TICK_S = 1.0


def _on_stderr() -> dict[str, Any]:
    """Arguments for tqdm: whether a bar is disabled, where None does so if stderr is no terminal; and the size of a terminal
    that tells none, as in a container or a script, on which tqdm would draw nothing."""
    given: dict[str, Any] = {"disable": True if os.environ.get("CHUNKFLOW_PROGRESS") == "0" else None}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be any object with a method write
        if 0 in os.get_terminal_size(sys.stderr.fileno()):
            given |= {"ncols": 100, "nrows": 24}
    return given


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
        **_on_stderr(),
    ) as bar:
        yield bar.update


@contextlib.contextmanager
def planning(what: str) -> Iterator[None]:
    """One line while a step waits for a plan."""
    with line(f"planning {what}"):
        yield


def line(text: str = "") -> tqdm[Any]:
    """A line that begins with the time since it was made, which a thread updates until the line is closed: the work that it
    reports may be one call of a compiler that takes minutes."""
    bar = tqdm(bar_format="chunkflow [{elapsed}] {desc}", desc=text, leave=False, mininterval=0, **_on_stderr())
    if not bar.disable:
        threading.Thread(target=_tick, args=(bar,), name="chunkflow progress", daemon=True).start()
    return bar


def _tick(bar: tqdm[Any]) -> None:
    while not bar.disable:  # closing a bar disables it
        time.sleep(TICK_S)
        with bar.get_lock():  # or a bar that is being closed would be drawn again
            if not bar.disable:
                bar.refresh(nolock=True)
