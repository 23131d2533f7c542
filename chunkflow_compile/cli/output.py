"""Output of the commands: tables on stdout, JSON to a file or (instead of tables) to stdout, progress on stderr."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import tempfile
import traceback
from pathlib import Path

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.record import as_json, check_writable

STDOUT = "-"


def check_json(arguments: argparse.Namespace) -> None:
    """Check the file given by ``--json`` before any work starts.  Raises ChunkflowError if it cannot be written."""
    if (file := getattr(arguments, "json", None)) and file != STDOUT:
        check_writable(Path(file))


def say(arguments: argparse.Namespace, text: str) -> None:
    """Print ``text`` and flush, unless stdout is used for JSON."""
    if arguments.json != STDOUT:
        print(text, flush=True)


def write_json(arguments: argparse.Namespace, body: object) -> None:
    """Write JSON to the destination given by ``--json``, if the option is set.  ``body``: a value to convert to JSON, or
    a string that is JSON already."""
    text = body if isinstance(body, str) else as_json(body)
    if arguments.json == STDOUT:
        print(text, end="")
    elif arguments.json:
        try:
            Path(arguments.json).write_text(text)
        except OSError as error:
            raise ChunkflowError(f"{arguments.json} cannot be written: {error.strerror}.") from error


def called(*words: str) -> str:
    """Return a command line that the user can copy.  It calls the program in the same way as the user has called it.
    ``words``: the arguments."""
    script = Path(sys.argv[0])
    if script.stem != "chunkflow":
        program = [sys.executable, "-m", "chunkflow_compile.cli.main"]
    else:
        on_path = shutil.which(script.stem)
        program = [script.stem if on_path and script.exists() and script.samefile(on_path) else str(script)]
    return shlex.join([*program, *words])


def save_traceback() -> str:
    """Write the traceback of the current exception to a new file and return its path.  If the file cannot be written,
    return the option that shows the traceback."""
    text = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="chunkflow-trace-", suffix=".txt", delete=False) as file:
            file.write(text)
    except OSError:
        return "--debug"
    return file.name
