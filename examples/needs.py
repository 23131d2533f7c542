"""What an example needs to start: if a package is missing, or the number of processes is wrong, it ends with one sentence."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

# Package -> what pip installs it with, in a clone of the repository, if that is not its name.
_INSTALL = {
    "diffusers": "'.[diffusers]'",
    "transformers": "'.[diffusers]'",
    "peft": "'.[adapters]'",
    "sklearn": "scikit-learn",
}


def need(*packages: str, heads: int = 1, least: int = 1) -> int:
    """Return the number of processes that torchrun has started, 1 without torchrun; or end this one.

    ``packages``: must be installed.  ``heads``: attention heads of the model, a multiple of the number of processes; 1 for an
    example that runs in one process.  ``least``: the smallest number of processes.
    """
    script, ranks = Path(sys.argv[0]).name, int(os.environ.get("WORLD_SIZE", "1"))
    if missing := [name for name in packages if find_spec(name) is None]:
        install = " ".join(dict.fromkeys(_INSTALL.get(name, name) for name in missing))
        raise SystemExit(f"{script} needs {' and '.join(missing)}: pip install {install}")
    if ranks < least:
        raise SystemExit(
            f"{script} needs at least {least} processes: torchrun --nproc-per-node {least} examples/{script}"
        )
    if heads == 1 < ranks:
        raise SystemExit(f"{script} runs in one process, and torchrun started {ranks}: python examples/{script}")
    if heads % ranks:
        raise SystemExit(
            f"{script} gives each process the same number of attention heads, but {ranks} processes do not divide {heads} "
            "heads: start another number of processes with --nproc-per-node"
        )
    return ranks
