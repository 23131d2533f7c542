"""Progress on stderr: for moving a model's weights, for planning and compiling, and for the phases of a command.

``CHUNKFLOW_PROGRESS=0`` in the environment disables all progress.  Bars are shown on a terminal only.
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

# Seconds until a bar is shown.  Small models are moved in less time and need no bar.
DELAY_S = 1.0
# Seconds between two updates of the elapsed time that a line shows.
TICK_S = 1.0
# Without a terminal, a phase of a command that takes longer than QUIET_S seconds is announced by a line.  The line is
# printed again every EVERY_S seconds until the phase ends.
QUIET_S, EVERY_S = 2.0, 10.0


def off() -> bool:
    """Whether the user has disabled progress."""
    return os.environ.get("CHUNKFLOW_PROGRESS") == "0"


def _on_stderr() -> dict[str, Any]:
    """Return arguments for tqdm.

    ``disable``: True if the user has disabled progress; otherwise None, with which tqdm shows a bar only if stderr is a
    terminal.  ``ncols``, ``nrows``: a default size for a terminal that does not report its size, as in a container or a
    script; without a size, tqdm would draw nothing.
    """
    given: dict[str, Any] = {"disable": True if off() else None}
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be any object with a write method
        if 0 in os.get_terminal_size(sys.stderr.fileno()):
            given |= {"ncols": 100, "nrows": 24}
    return given


@contextlib.contextmanager
def moving(what: str, nbytes: int, expected: str = "") -> Iterator[Callable[[int], object]]:
    """Show a progress bar for a move of ``nbytes``, once the move has taken DELAY_S seconds.  The context yields a
    function.  After each weight was moved, call this function with the weight's size in bytes.

    ``expected``: the expected duration in words; if it is given, the bar is shown at once.
    """
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
    """Show one line while a step waits for a plan."""
    with line(f"planning {what}"):
        yield


def line(text: str = "") -> tqdm[Any]:
    """Return a line that starts with the elapsed time.  A thread updates the time until the line is closed, because the
    reported work may be a single compiler call that takes minutes."""
    return _Line(bar_format="chunkflow [{elapsed}] {desc}", desc=text, leave=False, mininterval=0, **_on_stderr())


class _Line(tqdm):  # type: ignore[type-arg]
    """A bar that is redrawn every TICK_S seconds until it is closed."""

    def __init__(self, **given: Any) -> None:
        self._until_closed = contextlib.ExitStack()
        super().__init__(**given)
        if not self.disable:
            self._until_closed.enter_context(_ticking(self.refresh))

    def close(self) -> None:
        self._until_closed.close()  # first, because the thread would otherwise draw the bar again
        super().close()


@contextlib.contextmanager
def _ticking(tick: Callable[[], object]) -> Iterator[None]:
    """A context in which a thread calls ``tick`` every TICK_S seconds."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(TICK_S):
            tick()

    thread = threading.Thread(target=run, name="chunkflow progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class Lines:
    """Progress as plain lines: one line for a phase that takes QUIET_S seconds or longer, and another line after every
    EVERY_S seconds.

    ``now``: a clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = self._told = now()
        self._phase = self._announced = ""

    def begin(self, phase: str) -> None:
        """Begin a phase."""
        self._phase = phase
        self.tick()

    def tick(self) -> None:
        """Print a line if it is time for one.  During a phase, this method is called every TICK_S seconds."""
        now = self._now()
        if now - self._told >= (EVERY_S if self._phase == self._announced else QUIET_S):
            self._told, self._announced = now, self._phase
            print(f"{now - self._began:4.0f} s  {self._phase}", file=sys.stderr, flush=True)


class Progress:
    """Progress over the phases of a command: a bar on a terminal, :class:`Lines` elsewhere."""

    def __init__(self, phases: int) -> None:
        shape = "{desc} |{bar:20}| {n_fmt}/{total_fmt} {elapsed}"
        self._bar = tqdm(total=phases, leave=False, bar_format=shape, **_on_stderr())
        self._lines = Lines() if self._bar.disable and not off() else None

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Show ``what`` during the phase, and keep the elapsed time up to date."""
        self._bar.set_description_str(what)
        if self._lines is not None:
            self._lines.begin(what)
        try:
            with _ticking(self._bar.refresh if self._lines is None else self._lines.tick):
                yield
        except BaseException:
            self._bar.close()
            raise
        self._bar.update()
        if self._bar.n >= (self._bar.total or 0):
            self._bar.close()
