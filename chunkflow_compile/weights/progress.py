"""Progress on stderr: of moving a model's weights, of compiling it, and of planning.

Shown on a terminal only, and not with ``CHUNKFLOW_PROGRESS=0`` in the environment.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

from torch._dynamo.callback import callback_handler
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
    with _line(f"chunkflow: planning {what}"):
        yield


def _line(text: str = "") -> tqdm[Any]:
    """A line with the time that has passed."""
    return tqdm(bar_format="{desc} {elapsed}", desc=text, leave=False, disable=_disabled(), mininterval=0)


def forget_at_end(callback: Callable[[Any], None]) -> None:
    """Remove a callback of Dynamo's at the end of a compilation, also while the callbacks are called."""
    # a new list: they are called from the old one, and each must have its turn
    callback_handler.end_callbacks = [c for c in callback_handler.end_callbacks if c != callback]


class CompileProgress:
    """What compilation does now, in one line, while the first call of a model runs: a context manager.

    ``kinds``: the number of compilations to expect.
    """

    def __init__(self, kinds: int) -> None:
        self._kinds = kinds
        self._done = 0
        self._bar: tqdm[Any] | None = None
        self._shown = False

    def __enter__(self) -> None:
        if not self._shown:  # another thread may have begun
            self._shown = True
            callback_handler.register_start_callback(self._begins)

    def __exit__(self, *_: object) -> None:
        if self._shown:
            self._shown = False
            callback_handler.remove_start_callback(self._begins)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, what: str) -> None:
        """Show what is being done for the current kind."""
        if self._bar is not None:
            number = min(self._done + 1, self._kinds)
            self._bar.set_description_str(f"chunkflow: {what} (part {number} of {self._kinds})")

    def compiled(self) -> None:
        """A kind is compiled."""
        self._done += 1

    def _begins(self, _: object) -> None:
        if self._bar is None:
            self._bar = _line()
        self.say("tracing")
