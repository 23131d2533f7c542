"""``chunkflow``: parses the command line and calls one command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from chunkflow_compile.cli import calibrate, demo, plan, simulate
from chunkflow_compile.passes.errors import ChunkflowError

COMMANDS = (demo, plan, simulate, calibrate)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.  Returns 0 if all is well, 1 on a finding, 2 on bad use."""
    parser = argparse.ArgumentParser(
        prog="chunkflow",
        description="Runs diffusion transformers that do not fit the GPU: weights stream from host memory.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.run(arguments))
    except ChunkflowError as error:
        print(f"chunkflow: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
