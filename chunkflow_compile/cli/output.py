"""What commands say, and where: tables on stdout, JSON in a file or on stdout instead, progress on stderr."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.record import check_writable

STDOUT = "-"


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """The option ``--json``, the same everywhere."""
    parser.add_argument("--json", metavar="FILE", help=f"write {what} there, or to stdout instead of tables if it is -")


def check_json(arguments: argparse.Namespace) -> None:
    """Before any work.  Raises ChunkflowError if the file of ``--json`` is unwritable."""
    if arguments.json and arguments.json != STDOUT:
        check_writable(Path(arguments.json))


def say(arguments: argparse.Namespace, text: str) -> None:
    """Prints for people, unless stdout is for JSON."""
    if arguments.json != STDOUT:
        print(text)


def write_json(arguments: argparse.Namespace, body: str) -> None:
    """Writes JSON where ``--json`` says, if it was given."""
    if arguments.json == STDOUT:
        print(body, end="")
    elif arguments.json:
        try:
            Path(arguments.json).write_text(body)
        except OSError as error:
            raise ChunkflowError(f"{arguments.json} cannot be written: {error.strerror}.") from error


def first_line(error: BaseException) -> str:
    """What kind of error it is, and the first line of what it says."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {said}"


def save_traceback() -> str:
    """Writes the traceback of the error being handled to a file of its own; returns its path."""
    with tempfile.NamedTemporaryFile("w", prefix="chunkflow-trace-", suffix=".txt", delete=False) as file:
        file.write(traceback.format_exc())
    return file.name


class Progress:
    """A bar on stderr over the phases of a command, where stderr is a terminal."""

    def __init__(self, phases: int) -> None:
        self._bar = tqdm(
            total=phases, leave=False, disable=None, bar_format="{desc} |{bar:20}| {n_fmt}/{total_fmt} {elapsed}"
        )

    @contextlib.contextmanager
    def phase(self, what: str) -> Iterator[None]:
        """Shows ``what`` while it lasts; the clock goes on although nothing else can be told of it."""
        self._bar.set_description_str(what)
        over = threading.Event()
        ticker = threading.Thread(target=self._tick, args=(over,), daemon=True)
        ticker.start()
        try:
            yield
        except BaseException:
            self._bar.close()
            raise
        finally:
            over.set()
            ticker.join()
        self._bar.update()
        if self._bar.n >= (self._bar.total or 0):
            self._bar.close()

    def _tick(self, over: threading.Event) -> None:
        while not self._bar.disable and not over.wait(1.0):
            self._bar.refresh()
