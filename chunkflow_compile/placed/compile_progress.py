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

from chunkflow_compile.weights.locks import ProcessLock
from chunkflow_compile.weights.progress import line

_log = logging.getLogger(__name__)

# A compilation that takes as long as this is worth a line that stays.
LINE_S = 2.0


class CompileProgress:
    """What compilation does now, in one line, while a model is called: a context manager.

    Of a compilation that takes LINE_S or longer, a line stays, and is logged at INFO, whether there is a terminal or not.
    ``name``: of the model.  ``kinds``: the number of compilations to expect in its first call.  ``now``: a clock, seconds.
    """

    # of all models: Dynamo has one list of callbacks, and goes through it without a lock
    _registering = ProcessLock()

    def __init__(self, name: str, kinds: int, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._name = name
        self._kinds = kinds
        self._done = 0
        self._parts = set[str]()  # that were compiled, by name
        self._bar: tqdm[Any] | None = None
        self._lock = ProcessLock()
        self._threads = Counter[int]()  # the calls of the model that each thread is in: a forward may call its model
        self._began = dict[int, float]()  # thread -> when its compilation under way has begun

    def __enter__(self) -> None:
        with self._lock():
            if not self._threads:
                with self._registering():
                    callback_handler.register_start_callback(self._begins)
            self._threads[threading.get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock():
            self._threads -= Counter([threading.get_ident()])  # keeps no zeros
            self._began.pop(threading.get_ident(), None)  # it failed, or read no weight
            if self._threads:
                return
            with self._registering():
                # a new list: Dynamo may go through the old one; torch._dynamo.reset() has cleared it
                callback_handler.start_callbacks = [c for c in callback_handler.start_callbacks if c != self._begins]
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def say(self, what: str) -> None:
        """Show what is being done for the current part."""
        with self._lock():
            if self._bar is not None:
                which = f"part {self._done + 1} of {self._kinds}" if self._done < self._kinds else "for other inputs"
                self._bar.set_description_str(f"chunkflow: {self._name}: {what} ({which})")

    def compiled(self, weights: Iterable[str]) -> None:
        """A part is compiled, which reads the weights of these names."""
        modules = [name.rpartition(".")[0].replace(".", "/") for name in weights]
        part = posixpath.commonpath(modules).replace("/", ".")
        with self._lock():
            again = " for other inputs" if part in self._parts else ""
            self._parts.add(part)
            self._done += 1
            began = self._began.pop(threading.get_ident(), None)
            if began is None or (seconds := self.now() - began) < LINE_S:
                return
            text = f"{self._name}: compiled{part and f' {part}'}{again} in {seconds:.1f} s"
            _log.info("%s", text)
            if self._bar is not None and not self._bar.disable:
                self._bar.write(f"chunkflow: {text}", file=sys.stderr)

    def _begins(self, _: object) -> None:
        with self._lock():
            if (thread := threading.get_ident()) not in self._threads:  # another model's
                return
            self._began[thread] = self.now()
            if self._bar is None:
                self._bar = line()
            self.say("tracing")
