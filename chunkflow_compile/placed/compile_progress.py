"""Show on stderr which part of a model is being compiled.  See also ``weights/progress.py``."""

from __future__ import annotations

import contextlib
import logging
import posixpath
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

from torch import nn
from tqdm import tqdm

from chunkflow_compile.private_torch.dynamo import callback_handler
from chunkflow_compile.weights.locks import ProcessLock
from chunkflow_compile.weights.progress import line

_log = logging.getLogger(__name__)

# The end of a compilation is reported if the compilation has taken at least this many seconds.
LINE_S = 2.0


class CompileProgress:
    """A context manager for calls of a model.  While the model is compiled, one line shows which part is being compiled.

    The line appears when Dynamo begins, before the first part is traced.  The line shows the name and the number of the part,
    and the elapsed time.  If the compilation of a part takes LINE_S seconds or longer, its end is also reported.  The first
    appearance of the line, and each reported end, are also logged at level INFO, even if stderr is not a terminal.
    ``name``: the name of the model.  ``kinds``: the expected number of compilations in the first call, or 0 if the number is
    not known.  ``model``: the model; only a weak reference to it is kept.  ``now``: a function that returns the current time
    in seconds.
    """

    # all models share this lock, because Dynamo has a single list of callbacks
    _registering = ProcessLock()

    def __init__(self, name: str, kinds: int, model: nn.Module, now: Callable[[], float] = time.monotonic) -> None:
        self.now = now
        self._name = name
        self._kinds = kinds
        self._model = weakref.ref(model)
        self._done = 0
        self._part = ""  # Name of the part that is being compiled; empty if the name is not known.
        self._parts = set[str]()  # Names of the compiled parts.
        self._bar: tqdm[Any] | None = None
        self._lock = ProcessLock()
        self._threads = Counter[int]()  # Thread id -> the number of its nested calls of the model.
        self._began = dict[int, float]()  # Thread id -> start time of its running compilation.

    def __enter__(self) -> None:
        with self._lock():
            if not self._threads:
                with self._registering():
                    callback_handler.register_start_callback(self._begins)
            self._threads[threading.get_ident()] += 1

    def __exit__(self, *_: object) -> None:
        with self._lock():
            self._threads -= Counter([threading.get_ident()])  # Counter drops the thread if its count becomes zero.
            # ``_began`` still contains a start time if the compilation failed, or if the compiled graph reads no weights.
            self._began.pop(threading.get_ident(), None)
            if self._threads:
                return
            with self._registering():
                # Assign a new list, because Dynamo may be iterating over the old list.  ``list.remove`` would also fail if
                # torch._dynamo.reset() has cleared the list.
                callback_handler.start_callbacks = [c for c in callback_handler.start_callbacks if c != self._begins]
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """A context that shows the progress line while the backend works.

        The model may also be called outside the context of this object.  The line then appears only after Dynamo has traced
        the part, and the elapsed time does not include the tracing.
        """
        with self:
            with self._lock():
                if threading.get_ident() not in self._began:
                    self._show()
            yield

    def say(self, what: str) -> None:
        """Show ``what``, the current stage of the compilation."""
        with self._lock():
            if self._bar is not None:
                self._bar.set_description_str(f"{self._name}: compiling{self._which()}: {what}")

    def compiled(self, weights: Iterable[str]) -> None:
        """Report that a part was compiled.  ``weights``: names of the weights that the part reads."""
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
            if (thread := threading.get_ident()) not in self._threads:  # this thread is compiling another model
                return
            self._began[thread] = self.now()
            self._show()

    def _show(self) -> None:
        """Show the progress line with the name of the part that this thread is compiling."""
        self._part = self._called()
        if self._bar is None:
            _log.info("%s: compiling%s", self._name, self._which())
            self._bar = line(f"{self._name}: compiling")
        self.say("tracing")

    def _which(self) -> str:
        part = self._part and f" {self._part}"
        if self._done < self._kinds:
            return f"{part} ({self._done + 1} of {self._kinds})"
        return f"{part} for other inputs" if self._kinds else f"{part} (graph {self._done + 1})"

    def _called(self) -> str:
        """Return the name of the innermost module of the model that this thread is calling; empty for the model itself.

        This method looks for the module on the call stack, because Dynamo does not tell its callbacks which code it is
        compiling.
        """
        model = self._model()
        names: dict[nn.Module, str] = {}
        if model is not None:
            names = {module: name for name, module in model.named_modules()}
        call = getattr(nn.Module.__call__, "__code__", None)  # this code runs in all calls of modules, compiled or not
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is call and (module := frame.f_locals["self"]) in names:
                return names[module]
            frame = frame.f_back
        return ""
