"""``chunkflow``: parses the command line and runs a command."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import shutil
import sys
from collections.abc import Sequence

from chunkflow_compile import __version__
from chunkflow_compile.catalog.quiet import quiet_imports
from chunkflow_compile.hardware.caches import importing_torch
from chunkflow_compile.passes.errors import ChunkflowError, FindingError, first_line
from chunkflow_compile.report.record import PROSE_WIDTH

from .output import check_json, save_traceback
from .parsers import AUDIENCES, COMMANDS

DESCRIPTION = """\
Runs diffusion transformers that are too large for GPU memory: weights stay in
host memory and are copied to the GPU while each denoising step computes.
"""

EPILOG = """\
MODEL is a preset, or file.py:function, a function that returns a model and the
keyword arguments of one call.  Planning needs no weights and no GPU.

exit codes:
  0  success
  1  a check failed
  2  bad use: the sentence on stderr says what to change

Tables go to stdout, notes and progress to stderr; --json writes the same as JSON.
CHUNKFLOW_PROGRESS=0 turns progress off.
chunkflow COMMAND --help lists the options of a command, with an example.

examples:
  chunkflow pipeline flux.1-dev --memory 12GiB --hardware rtx-4080-pcie
  chunkflow plan wan2.2-ti2v-5b --memory 4GiB
  chunkflow doctor
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code: 0 on success, 1 if it found a problem, 2 for any other error, 130 if it was
    interrupted."""
    given = sys.argv[1:] if argv is None else argv
    if said := _misspelt(given):
        print(f"chunkflow: {said}", file=sys.stderr)
        return 2
    parser = _parser()
    arguments, unknown = parser.parse_known_args(given)
    if unknown:
        print(f"chunkflow: {_unknown(unknown, arguments)}", file=sys.stderr)
        return 2
    if arguments.command is None:
        parser.print_help()
        return 0
    try:
        check_json(arguments)
        with quiet_imports():
            with importing_torch():  # because most commands import torch
                command = importlib.import_module(f"chunkflow_compile.cli.{arguments.command}")
            code = int(command.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the process that reads stdout has ended, as in chunkflow dump ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("chunkflow: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if arguments.debug:
            raise
        if isinstance(error, ChunkflowError):
            print(f"chunkflow: {_with_options(str(error), arguments.options)}", file=sys.stderr)
            return 1 if isinstance(error, FindingError) else 2
        print(f"chunkflow: {first_line(error)} (unexpected; full traceback: {save_traceback()})", file=sys.stderr)
        return 2


def _with_options(said: str, options: Sequence[str]) -> str:
    """Replace Python arguments in an error message by command-line options.  Errors of the library mention arguments such
    as ``memory='4GiB'``, but the user has written ``--memory 4GiB``."""
    names = {option.strip("-").replace("-", "_"): option for option in options}

    def option(match: re.Match[str]) -> str:
        word, name, given = match[1] or "", match[2], match[3]
        return names[name] + (" " if given else "") if word or given or "_" in name else match[0]

    return re.sub(rf"(?<![\w./-])([Oo]ption )?({'|'.join(names)})\b(=?)", option, said)


def _misspelt(argv: Sequence[str]) -> str:
    """Return a message with a suggestion for a command that does not exist; empty if the command exists or if there is no
    command."""
    name = next(iter(argv), "")
    if name.startswith("-") or name in ("", *COMMANDS):
        return ""
    close = difflib.get_close_matches(name, COMMANDS, n=1)
    meant = f"; did you mean {close[0]!r}?" if close else "."
    return f"There is no command {name!r}{meant} chunkflow --help lists the commands."


def _unknown(words: Sequence[str], arguments: argparse.Namespace) -> str:
    """Return a message with a suggestion for the first of several unknown arguments."""
    command = "chunkflow" if arguments.command is None else f"chunkflow {arguments.command}"
    name = words[0].partition("=")[0]
    if not name.startswith("-"):
        return f"{command} takes no further argument {name!r}. {command} --help lists what it takes."
    close = difflib.get_close_matches(name, getattr(arguments, "options", ("--help", "--version")), n=1)
    meant = f"; did you mean {close[0]}?" if close else "."
    return f"{command} has no option {name}{meant} {command} --help lists its options."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chunkflow",
        usage="chunkflow [-h] [--version] COMMAND ...",
        description=f"{DESCRIPTION}\n{_listed()}",
        epilog=EPILOG,
        formatter_class=_formatter,
    )
    parser.add_argument("--version", action="version", version=f"chunkflow {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", prog="chunkflow", help=argparse.SUPPRESS)
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name, description=command.description, epilog=command.epilog, formatter_class=_formatter
        )
        command.arguments(own)
        own.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
        own.set_defaults(options=re.findall(r"--[\w-]+", own.format_usage()))
    return parser


def _formatter(prog: str) -> argparse.HelpFormatter:
    """Return a help formatter with lines of at most PROSE_WIDTH characters, even on wider terminals."""
    columns = shutil.get_terminal_size().columns - 2  # like argparse's default width
    return argparse.RawDescriptionHelpFormatter(prog, width=max(40, min(columns, PROSE_WIDTH)))


def _listed() -> str:
    """Return a list of the commands by audience, with one line per command."""
    parts = []
    for title, names in AUDIENCES.items():
        parts.append("\n".join([f"{title}:", *(f"  {name:10} {COMMANDS[name].summary}" for name in names)]))
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
