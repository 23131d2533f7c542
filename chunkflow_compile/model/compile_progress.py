"""Progress on stderr of compiling a model, see ``weights/progress.py``."""

from __future__ import annotations

import logging
import posixpath
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from torch._dynamo.callback import callback_handler
from tqdm import tqdm

from chunkflow_compile.weights.progress import line

_log = logging.getLogger(__name__)

# A compilation that takes as long as this is worth a line that stays.
LINE_S = 2.0


def forget_at_end(callback: Callable[[Any], None]) -> None:
    """Remove a callback of Dynamo's at the end of a compilation, also while the callbacks are called."""
    # a new list: they are called from the old one, and each must have its turn
    callback_handler.end_callbacks = [c for c in callback_handler.end_callbacks if c != callback]


class CompileProgress:
    """What compilation does now, in one line, while a model is called: a context manager.

    Of a compilation that takes LINE_S or longer, a line stays, and is logged at INFO, whether there is a terminal or not.
    ``name``: of the model.  ``kinds``: the number of compilations to expect in its first call.  ``now``: a clock, seconds.
    """

    def __init__(self, name: str, kinds: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._name = name
        self._kinds = kinds
        self._done = 0
        self._parts = set[str]()  # that were compiled, by name
        self._said = ""  # of the compilation under way, once it is done
        self._began = 0.0
        self._bar: tqdm[Any] | None = None
        self._lock = threading.Lock()
        self._threads = Counter[int]()  # the calls of the model that each thread is in: a forward may call its model

    def __enter__(self) -> None:
        with self._lock:
            if not self._threads:
                callback_handler.register_start_callback(self._begins)
                callback_handler.register_end_callback(self._ends)
            self._threads[threading.get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._threads -= Counter([threading.get_ident()])  # keeps no zeros
            if self._threads:
                return
            # not remove_start_callback: torch._dynamo.reset() may have removed them
            callback_handler.start_callbacks = [c for c in callback_handler.start_callbacks if c != self._begins]
            forget_at_end(self._ends)
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def say(self, what: str) -> None:
        """Show what is being done for the current part."""
        if self._bar is not None:
            which = f"part {self._done + 1} of {self._kinds}" if self._done < self._kinds else "for other inputs"
            self._bar.set_description_str(f"chunkflow: {self._name}: {what} ({which})")

    def compiled(self, weights: Iterable[str]) -> None:
        """A part is compiled, which reads the weights of these names."""
        modules = [name.rpartition(".")[0].replace(".", "/") for name in weights]
        part = posixpath.commonpath(modules).replace("/", ".")
        again = " for other inputs" if part in self._parts else ""
        self._said = f"compiled {part}{again}" if part else f"compiled{again}"
        self._parts.add(part)
        self._done += 1

    def _begins(self, _: object) -> None:
        if threading.get_ident() not in self._threads:  # another model's
            return
        self._began, self._said = self.now(), ""
        if self._bar is None:
            self._bar = line()
        self.say("tracing")

    def _ends(self, _: object) -> None:
        if threading.get_ident() not in self._threads or not self._said:  # it failed, or read no weight
            return
        if (seconds := self.now() - self._began) >= LINE_S:
            text = f"{self._name}: {self._said} in {seconds:.1f} s"
            _log.info("%s", text)
            if self._bar is not None and not self._bar.disable:
                self._bar.write(f"chunkflow: {text}", file=sys.stderr)
