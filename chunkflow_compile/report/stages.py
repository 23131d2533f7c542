"""Write compilation stages to files: each stage as ``NN_stage.py``, its diff to the previous stage, the plan, and a report.

The files list every line of a stage, so that tools can compare them.  The report folds equal blocks.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch.distributed as dist
from tabulate import tabulate

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import STAGES, StageName
from chunkflow_compile.passes.pass_pipeline import Stage

from .annotate import Annotator, FlopNotes
from .lines import op_counts, stage_lines
from .listings import render
from .plan_tables import blocks_table, summary_table
from .record import check_folder

PLAN_FILE = "plan.json"
REPORT_FILE = "report.txt"


@dataclass(frozen=True)
class Written:
    """A stage that was written to a file.

    ``lines``: the number of lines.  ``ops``: the number of lines per op.  ``added``, ``removed``: the numbers of added and
    removed lines compared with the previous stage, as text with a sign.
    """

    name: str
    path: Path
    lines: int
    ops: Counter[str]
    added: str = ""
    removed: str = ""


class StageWriter:
    """Writes each stage to a folder as soon as the stage exists.

    If a pass fails, the last file shows the stage before this pass.
    ``annotate``: whether to add notes to the lines.  Raises ChunkflowError if the folder cannot be written.
    """

    def __init__(self, folder: Path, hardware: Hardware, *, annotate: bool = False) -> None:
        self.folder = folder
        self.hardware = hardware
        self.annotate = annotate
        self.written: list[Written] = []
        self._before: list[str] = []
        self._newest: Stage | None = None
        check_folder(folder)
        with _report_write_errors(folder):
            for name in (*(f"{_file_stem(n)}.{e}" for n in STAGES for e in ("py", "diff")), PLAN_FILE, REPORT_FILE):
                (folder / name).unlink(missing_ok=True)  # so that the folder contains no files of an earlier run

    def add(self, stage: Stage) -> None:
        """Write one stage."""
        lines = stage_lines(stage)
        plain = [line.text for line in lines]
        name = _file_stem(stage.name)
        path = self.folder / f"{name}.py"
        written = Written(stage.name, path, len(plain), op_counts(lines))
        with _report_write_errors(self.folder):
            path.write_text(render(lines, annotator(stage, self.hardware) if self.annotate else None))
            if self.written:
                before = self.written[-1]
                files = before.path.name, path.name
                difference = list(difflib.unified_diff(self._before, plain, *files, n=1, lineterm=""))
                signs = Counter(line[0] for line in difference[2:])
                written = replace(written, added=f"+{signs['+']}", removed=f"-{signs['-']}")
                old, new = before.ops, written.ops
                changed = [f"# {op}: {old[op]} -> {new[op]}" for op in sorted(old | new) if old[op] != new[op]]
                counts = changed or ["# op counts unchanged"]
                path.with_suffix(".diff").write_text("\n".join([*counts, *difference]) + "\n")
            if stage.name == "planned" and stage.plan is not None:
                (self.folder / PLAN_FILE).write_text(stage.plan.to_json())
        self._before, self._newest = plain, stage
        self.written.append(written)

    def finish(self, title: str = "", forwards: int = 1) -> Path:
        """Write the report and return its path.

        The report contains the figures of the plan, a table of blocks, op counts, and an annotated and folded listing of the
        last stage.
        """
        stage = self._newest
        assert stage is not None
        parts = [title] if title else []
        if stage.plan is not None and stage.cut is not None:
            problem = stage.cut.problem
            parts += [summary_table(stage.plan, problem, forwards), blocks_table(stage.plan, problem)]
        parts.append(_counts_table(self.written))
        parts.append(f"{stage.name}:\n\n{render(stage_lines(stage), annotator(stage, self.hardware), full=False)}")
        path = self.folder / REPORT_FILE
        with _report_write_errors(self.folder):
            path.write_text("\n\n".join(parts))
        return path


def write_stages(run: Iterable[Stage], folder: str | Path, hardware: Hardware) -> tuple[Stage, Path]:
    """Write the stages of one compilation to the folder ``folder/rankR_N``, where N counts the compilations of rank R.

    Returns the last stage and the path of this folder.
    """
    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    base, number = Path(folder), 0
    while (target := base / f"rank{rank}_{number}").exists():
        number += 1
    writer = StageWriter(target, hardware)
    for stage in run:
        writer.add(stage)
    writer.finish()
    return stage, target


def annotator(stage: Stage, hardware: Hardware) -> FlopNotes:
    """Return the annotator for a stage.  If the stage has no regions yet, the annotator shows only FLOPs."""
    sizes = stage.traced.sizes
    return FlopNotes(sizes) if stage.cut is None else Annotator(stage.cut.problem, hardware, stage.plan, sizes)


def _counts_table(columns: Sequence[Written]) -> str:
    """Return a table of op counts with one column per stage.

    Rows are sorted by the counts in the last stage, and the most frequent op comes first.
    """
    names = sorted({op for w in columns for op in w.ops}, key=lambda op: (tuple(-w.ops[op] for w in columns[::-1]), op))
    rows = [(op, *(w.ops[op] or "" for w in columns)) for op in names]
    return tabulate(rows, headers=("op", *(w.name for w in columns)))


def _file_stem(name: StageName) -> str:
    return f"{STAGES.index(name):02}_{name}"


@contextlib.contextmanager
def _report_write_errors(path: Path) -> Iterator[None]:
    """Return a context in which an OSError becomes a ChunkflowError that names the path."""
    try:
        yield
    except OSError as error:
        raise ChunkflowError(f"{path} cannot be written: {error}. Give another folder.") from error
