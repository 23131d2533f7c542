"""Output of the commands: tables on stdout, JSON in a file or on stdout instead, progress on stderr."""

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
    """Check the file of ``--json`` before any work.  Raises ChunkflowError if it cannot be written."""
    if (file := getattr(arguments, "json", None)) and file != STDOUT:
        check_writable(Path(file))


def say(arguments: argparse.Namespace, text: str) -> None:
    """Print ``text`` at once, unless stdout is for JSON."""
    if arguments.json != STDOUT:
        print(text, flush=True)


def write_json(arguments: argparse.Namespace, body: object) -> None:
    """Write a value, or what is JSON already, where ``--json`` says, if it is set."""
    text = body if isinstance(body, str) else as_json(body)
    if arguments.json == STDOUT:
        print(text, end="")
    elif arguments.json:
        try:
            Path(arguments.json).write_text(text)
        except OSError as error:
            raise ChunkflowError(f"{arguments.json} cannot be written: {error.strerror}.") from error


def called(*words: str) -> str:
    """The command line of another command, to be pasted: the program is called as it was for this one."""
    script = Path(sys.argv[0])
    if script.stem != "chunkflow":
        program = [sys.executable, "-m", "chunkflow_compile.cli.main"]
    else:
        on_path = shutil.which(script.stem)
        program = [script.stem if on_path and script.exists() and script.samefile(on_path) else str(script)]
    return shlex.join([*program, *words])


def save_traceback() -> str:
    """Write the traceback of the error being handled to a new file; return its path, or the option that shows it."""
    text = traceback.format_exc()
    try:
        with tempfile.NamedTemporaryFile("w", prefix="chunkflow-trace-", suffix=".txt", delete=False) as file:
            file.write(text)
    except OSError:
        return "--debug"
    return file.name
