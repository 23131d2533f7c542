"""A compiled program as files: the listing and the plan."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.rewrite import Program


def dump_program(program: Program, folder: str | Path) -> Path:
    """Writes ``program.txt`` and ``plan.json`` under ``folder/rankR_N``; returns that folder.

    N counts the programs of a rank, so that nothing is overwritten.  Raises ChunkflowError if the folder is unwritable.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    try:
        base = Path(folder)
        base.mkdir(parents=True, exist_ok=True)
        number = 0
        while (target := base / f"rank{rank}_{number}").exists():
            number += 1
        target.mkdir()
        (target / "program.txt").write_text(str(program))
        (target / "plan.json").write_text(program.plan.to_json())
    except OSError as error:
        raise ChunkflowError(f"The program cannot be dumped to {folder}: {error}. Give another folder.") from error
    return target
