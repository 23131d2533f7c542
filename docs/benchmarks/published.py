"""Published step times beside predictions: every row of published_steps.csv, with its source.

python docs/benchmarks/published.py --out docs/benchmarks/published.md

A row says what was measured: a step, or a total over its steps, in which encoders and the decoder are.  ``attention``: the
kernel, as stated or as the engine takes it (``kernel_stated``).  Tracing takes ten minutes on two cores; --cache FILE keeps
the problems.
"""

from __future__ import annotations

import argparse
import csv
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, median
from typing import Any

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.presets import preset
from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, Policy
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.policies import block_regions
from chunkflow_compile.passes.problem import Collective, Problem

ROWS = Path(__file__).parent / "published_steps.csv"
# What is traced: a preset, its height, width and frames, and its Ulysses degree.
Traced = tuple[str, int, int, int, int]
# With Inductor's kernels, and with those of eager code.
Problems = dict[tuple[Traced, bool], Problem]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A measured step, seconds.  ``total``: whether it is a total divided by the number of steps."""

    model: str
    variant: str
    height: int
    width: int
    frames: int
    card: str
    hardware: str
    ulysses: int
    dtype: str
    engine: str
    fused: bool
    attention: str
    kernel_stated: bool
    offload: str
    policy: Policy
    total: bool
    seconds: float
    source: str

    @property
    def traced(self) -> Traced:
        return self.model, self.height, self.width, self.frames, self.ulysses

    @property
    def streams(self) -> bool:
        """Whether weights are moved in a step."""
        return self.offload not in ("none", "expert swap", "FSDP", "T5 on CPU")

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a part of the weights (FSDP), as those of the official code do where there are several."""
        return self.engine == "official" and self.ulysses > 1


@dataclass(frozen=True)
class Compared:
    row: Row
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.row.seconds - 1


def read(path: Path) -> list[Row]:
    with path.open() as file:
        return [_row(told) for told in csv.DictReader(file)]


def _row(told: dict[str, str]) -> Row:
    found: dict[str, Any] = {field.name: told[field.name] for field in fields(Row) if field.name in told}
    found |= {name: int(told[name]) for name in ("height", "width", "ulysses")}
    found |= {
        "frames": int(told["frames"]) if told["model"].startswith(("wan", "hunyuan")) else 1,
        "fused": told["lowering"] == "inductor",
        "kernel_stated": told["kernel_stated"] == "yes",
        "total": told["measured"] == "total",
        "seconds": float(told["seconds"]),
    }
    return Row(**found)


def trace(what: Traced) -> tuple[Traced, Problem, Problem]:
    """What was traced, its problem with Inductor's kernels, and with those of eager code."""
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    model, height, width, frames, degree = what
    known = preset(model)
    sizes = replace(known.sizes, height=height, width=width, frames=frames, batch=1)
    traced = known.trace(degree, sizes)
    fused, eager = (make_cut(replace(traced, fused=fused)).problem for fused in (True, False))
    return what, fused, eager


def traces(wanted: Iterable[Traced], cache: Path | None) -> Problems:
    found: Problems = pickle.loads(cache.read_bytes()) if cache is not None and cache.exists() else {}
    todo = sorted(set(wanted) - {what for what, _ in found})
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for what, fused, eager in tqdm(pool.map(trace, todo), total=len(todo), desc="tracing"):
            found |= {(what, True): fused, (what, False): eager}
            if cache is not None:
                cache.write_bytes(pickle.dumps(found))
    return found


def compare(row: Row, problem: Problem) -> Compared:
    machine = load_profile(row.hardware)
    if row.attention != "auto":
        machine = machine.attending_by(row.attention)
    if row.sharded:
        problem = gathered(problem, row.ulysses)
    plan = place(problem, machine, policy=row.policy, chunk_bytes=DEFAULT_CHUNK_BYTES)
    assert plan.predicted is not None
    return Compared(row, plan.predicted.step_s * preset(row.model).forwards)


def gathered(problem: Problem, ranks: int) -> Problem:
    """With an all-gather of its weights for each block, which FSDP queues after the collectives of the block before."""
    made = list(problem.collectives)
    for number, (first, last) in enumerate(block_regions(problem)):
        inside = sum(w.nbytes for w in problem.weights if w.uses and first <= w.uses[0] <= last)
        begin = max((c.until for c in problem.collectives if c.until <= first), default=0)
        made.append(
            Collective(
                name=f"gather_{number}",
                kind="all_gather",
                nbytes=inside * (ranks - 1) // ranks,
                before=begin,
                until=first,
                ranks=ranks,
            )
        )
    return replace(problem, collectives=tuple(sorted(made, key=lambda c: (c.before, c.until))))


def rows_table(found: Sequence[Compared]) -> str:
    rows = [
        (
            f"{c.row.model}, {c.row.variant}", c.row.card, c.row.ulysses, c.row.engine, c.row.attention,
            "" if c.row.offload == "none" else c.row.offload, f"{c.row.seconds:.4g} s", f"{c.predicted:.4g} s",
            f"{100 * c.error:+.1f} %", c.row.source,
        )
        for c in sorted(found, key=lambda c: c.error)
    ]  # fmt: skip
    headers = ("model", "card", "cards", "engine", "attention", "offload", "measured", "predicted", "error", "source")
    return tabulate(rows, headers=headers, tablefmt="github")


def groups_table(found: Sequence[Compared], name: str, key: Callable[[Row], str]) -> str:
    groups = defaultdict[str, list[float]](list)
    for c in found:
        groups[key(c.row)].append(c.error)
    rows = [
        (group, len(errors), f"{100 * fmean(errors):+.1f} %", f"{100 * median(map(abs, errors)):.1f} %")
        for group, errors in sorted(groups.items())
    ]
    return tabulate(rows, headers=(name, "rows", "mean error", "median absolute error"), tablefmt="github")


def page(found: Sequence[Compared], left_out: Sequence[Row]) -> str:
    resident = [c for c in found if not c.row.streams]
    steps, totals = ([c for c in resident if c.row.total is total] for total in (False, True))
    streamed = [c for c in found if c.row.streams]
    fused = [c for c in resident if c.row.fused and c.row.kernel_stated]
    eager = [c for c in resident if not c.row.fused]

    def middle(some: Sequence[Compared]) -> str:
        return f"{100 * median(abs(c.error) for c in some):.1f} % over {len(some)} rows"

    names = ", ".join(sorted({r.card for r in left_out}))
    return f"""# Published step times beside predictions

What others have measured, and what `chunkflow simulate` predicts for the same model, sizes, degree, attention kernel and
lowering.
Nothing here was run for this page; each row names its source. The official code of Wan shards weights over several cards:
an all-gather for each block is predicted with the rest. Written by `make published`, from
[published_steps.csv](published_steps.csv).

Median absolute error: {middle(fused)} of compiled or fused engines whose kernel is stated, {middle(eager)} of eager code.

**These are not predictions of unseen rows.** The share of the GEMM rate that models reach (`eta_gemm`: H100 and H200,
A100, and the Ada cards) and the attention of the RTX 5090 were chosen with rows of this page at hand, so the errors say
how well one rate for each kind of work describes them all. All other figures are from data sheets and measurements named
in each profile.
Quantised rows are predicted in bfloat16; where a kernel is not stated, the one that the engine takes is assumed.

![measured against predicted](published.png)

## By card

{groups_table(resident, "card", lambda r: r.card)}

## By engine

{groups_table(resident, "engine", lambda r: r.engine)}

## By attention kernel

{groups_table(resident, "kernel", lambda r: r.attention if r.kernel_stated else "not stated")}

## Steps

A step that was timed, or the denoising alone.

{rows_table(steps)}

## Totals over steps

Encoders, the decoder and the host's share are in these; they are predicted as steps, so the error says less.

{rows_table(totals)}

## With offload

By other mechanisms than those that are predicted (`layerwise`).

{rows_table(streamed)}

Not predicted, for want of a profile: {names or "none"}.
"""


def draw(found: Sequence[Compared], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 7), layout="constrained")
    for label, some in (
        ("fused, a step", [c for c in found if c.row.fused and not c.row.total]),
        ("fused, a total over steps", [c for c in found if c.row.fused and c.row.total]),
        ("eager, a step", [c for c in found if not c.row.fused and not c.row.total]),
        ("eager, a total over steps", [c for c in found if not c.row.fused and c.row.total]),
    ):
        axes.scatter([c.row.seconds for c in some], [c.predicted for c in some], label=label, s=28, alpha=0.8)
    ends = [min(c.row.seconds for c in found) / 1.5, max(c.row.seconds for c in found) * 1.5]
    axes.plot(ends, ends, color="0.3", linewidth=1)
    for factor in (0.8, 1.2):
        axes.plot(ends, [factor * e for e in ends], color="0.7", linewidth=1, linestyle="--")
    axes.set(
        xscale="log", yscale="log", xlabel="measured, s a step", ylabel="predicted, s a step", title="lines: 20 % off"
    )
    axes.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows like published_steps.csv")
    parser.add_argument("--cache", type=Path, help="keep the traced problems in this file")
    arguments = parser.parse_args()
    rows = read(arguments.rows)
    known = [row for row in rows if row.hardware in profile_names()]
    problems = traces((row.traced for row in known), arguments.cache)
    found = [compare(row, problems[row.traced, row.fused]) for row in known]
    draw([c for c in found if not c.row.streams], arguments.out.with_suffix(".png"))
    arguments.out.write_text(page(found, [row for row in rows if row not in known]))
    print(page(found, []).split("![")[0])


if __name__ == "__main__":
    main()
