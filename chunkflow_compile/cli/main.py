"""``chunkflow``: parses the command line and calls one command."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Sequence
from functools import partial

from chunkflow_compile.catalog.quiet import quiet_imports
from chunkflow_compile.hardware.caches import settle
from chunkflow_compile.passes.errors import ChunkflowError, FindingError, first_line

from .output import check_json, save_traceback
from .parsers import COMMANDS

DESCRIPTION = """\
Runs diffusion transformers that do not fit the GPU: weights stream from host
memory through a program that is planned and proved safe at compile time.

The planning commands need no weights and no GPU.  MODEL is a preset or
file.py:function, a function that returns a model and the keyword arguments of
one call.
"""

EPILOG = """\
exit codes:
  0  fine
  1  a finding: a check failed
  2  bad use: the sentence on stderr says what to change

Tables go to stdout, progress to stderr; --json writes the same as JSON.
chunkflow COMMAND --help lists the options of a command, with an example.

examples:
  chunkflow demo
  chunkflow plan wan2.2-ti2v-5b --ulysses 2 --hardware h100-pcie-x2 --memory 4GiB
  chunkflow dump wan2.2-ti2v-5b --ulysses 2 --annotate
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.  Return 0 if all is well, 1 on a finding, 2 on bad use, 130 if interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        if arguments.command != "doctor":  # which shows first what is wrong with it
            settle()
        check_json(arguments)
        with quiet_imports():
            command = importlib.import_module(f"chunkflow_compile.cli.{arguments.command}")  # torch, for most of them
            code = int(command.run(arguments))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader has closed the pipe, as in chunkflow dump ... | head
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
    """The text of an error that names arguments of Python, with the options of the command for them: the rooms below know
    ``memory='4GiB'``, and the user has written ``--memory 4GiB``."""
    names = {option.strip("-").replace("-", "_"): option for option in options}

    def option(match: re.Match[str]) -> str:
        word, name, given = match[1] or "", match[2], match[3]
        return names[name] + (" " if given else "") if word or given or "_" in name else match[0]

    return re.sub(rf"(?<![\w./-])([Oo]ption )?({'|'.join(names)})\b(=?)", option, said)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="chunkflow",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=partial(argparse.RawDescriptionHelpFormatter, max_help_position=16),
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, command in COMMANDS.items():
        own = commands.add_parser(
            name,
            help=command.summary,
            description=command.description,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.arguments(own)
        own.add_argument("--debug", action="store_true", help="show the Python traceback of an error")
        own.set_defaults(options=re.findall(r"--[\w-]+", own.format_usage()))
    return parser


if __name__ == "__main__":
    sys.exit(main())
