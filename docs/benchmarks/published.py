"""Compare published step times with predictions.  The file published_steps.csv contains the published times and their
sources.

python docs/benchmarks/published.py --out docs/benchmarks/published.md

The column ``measured`` says whether the published time is for a step or for a whole run ("total"), which includes
encoders and decoder.  The column ``attention`` is the attention kernel; ``kernel_stated`` says whether the source states
it, otherwise it is the default of the engine.  The script writes its predictions to the column ``predicted_s`` of the
same file, and makes the page and the picture from the file.  With ``--page-only`` it makes no new predictions.  Tracing
takes ten minutes on two cores; with ``--cache FILE``, traced problems are kept in a file.
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

from runs import errors_in_a_sentence
from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.presets import preset
from chunkflow_compile.hardware.profiles import load_profile, profile_names
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, Policy
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.placement.policies import block_regions
from chunkflow_compile.passes.problem import Collective, Problem
from chunkflow_compile.report.pictures import new_axes, save_figure

ROWS = Path(__file__).parent / "published_steps.csv"
# The parameters of a trace: a preset, its height, width and frames, and the Ulysses degree.
Traced = tuple[str, int, int, int, int]
# The problems by the parameters of the trace and by lowering: True for Inductor's kernels, False for eager kernels.
Problems = dict[tuple[Traced, bool], Problem]


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published step time.  ``seconds``: the published seconds per step.  ``total``: whether this is a total divided by
    the number of steps.

    ``predicted_s``: the predicted seconds per step, or 0 if there is no profile for the hardware.  ``timestep``: the form
    of the timestep for which the step is predicted.
    """

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
    predicted_s: float
    timestep: str

    @property
    def traced(self) -> Traced:
        return self.model, self.height, self.width, self.frames, self.ulysses

    @property
    def streams(self) -> bool:
        """Whether weights are copied during a step."""
        return self.offload not in ("none", "expert swap", "FSDP", "T5 on CPU")

    @property
    def error(self) -> float:
        """The relative error of the prediction: 0.05 if it is 5 % longer than the measured step."""
        return self.predicted_s / self.seconds - 1

    @property
    def sharded(self) -> bool:
        """Whether each rank holds a shard of the weights (FSDP).  This is so in the official code with several ranks."""
        return self.engine == "official" and self.ulysses > 1


def read(path: Path) -> list[Row]:
    """Return the rows of a file.  Raises ChunkflowError if the file cannot be read."""
    try:
        with path.open() as file:
            return [_row(told) for told in csv.DictReader(file)]
    except OSError as error:
        raise ChunkflowError(
            f"{path} cannot be read ({error.strerror}): give --rows a file like docs/benchmarks/published_steps.csv."
        ) from error


def _row(told: dict[str, str]) -> Row:
    found: dict[str, Any] = {field.name: told[field.name] for field in fields(Row) if field.name in told}
    found |= {name: int(told[name]) for name in ("height", "width", "ulysses")}
    found |= {
        "frames": int(told["frames"]) if told["model"].startswith(("wan", "hunyuan")) else 1,
        "fused": told["lowering"] == "inductor",
        "kernel_stated": told["kernel_stated"] == "yes",
        "total": told["measured"] == "total",
        "seconds": float(told["seconds"]),
        "predicted_s": float(told.get("predicted_s") or 0),
        "timestep": told.get("timestep", ""),
    }
    return Row(**found)


def keep(path: Path, predicted_s: Iterable[float | None]) -> None:
    """Write a prediction to each row of a file, together with the form of the timestep for which it was made."""
    with path.open() as file:
        told = list(csv.DictReader(file))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, dict.fromkeys((*told[0], "predicted_s", "timestep")), lineterminator="\n")
        writer.writeheader()
        for row, step_s in zip(told, predicted_s, strict=True):
            form = "" if step_s is None else preset(row["model"]).timestep
            writer.writerow({**row, "predicted_s": "" if step_s is None else f"{step_s:.6g}", "timestep": form})


def trace(what: Traced) -> tuple[Traced, Problem, Problem]:
    """Trace a model.  Return its parameters, its problem with Inductor's kernels, and its problem with eager kernels."""
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


def predict(row: Row, problem: Problem) -> float:
    """Return the predicted seconds per step."""
    machine = load_profile(row.hardware)
    if row.attention != "auto":
        machine = machine.attending_by(row.attention)
    if row.sharded:
        problem = gathered(problem, row.ulysses)
    plan = place(problem, machine, Goal(policy=row.policy), chunk_bytes=DEFAULT_CHUNK_BYTES)
    assert plan.predicted is not None
    return plan.predicted.step_s * preset(row.model).forwards


def gathered(problem: Problem, ranks: int) -> Problem:
    """Add an all-gather of the weights of each block to a problem.  FSDP queues it after the collectives of the previous
    block."""
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


def rows_table(rows: Sequence[Row]) -> str:
    cells = [
        (
            r.model, f"{r.ulysses} x {r.card}", r.engine, r.attention, f"{r.seconds:.4g}", f"{r.predicted_s:.4g}",
            f"{100 * r.error:+.1f}",
        )
        for r in sorted(rows, key=lambda r: r.error)
    ]  # fmt: skip
    headers = ("model", "GPUs", "engine", "attention", "measured, s", "predicted, s", "error, %")
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def groups_table(rows: Sequence[Row]) -> str:
    """Return a table of errors by GPU, by engine, and by attention kernel."""
    keys: tuple[Callable[[Row], str], ...] = (
        lambda r: r.card,
        lambda r: r.engine,
        lambda r: r.attention if r.kernel_stated else "kernel not stated",
    )
    cells = []
    for key in keys:
        groups = defaultdict[str, list[float]](list)
        for row in rows:
            groups[key(row)].append(100 * row.error)
        cells += [
            (name, len(errors), f"{fmean(errors):+.1f}", f"{median(map(abs, errors)):.1f}")
            for name, errors in sorted(groups.items())
        ]
    headers = ("GPU, engine or kernel", "rows", "mean error, %", "median absolute error, %")
    return tabulate(cells, headers=headers, tablefmt="github", disable_numparse=True)


def page(rows: Sequence[Row]) -> str:
    known = [r for r in rows if r.predicted_s]
    resident, streamed = ([r for r in known if r.streams is streams] for streams in (False, True))
    fused = [r for r in resident if r.fused and r.kernel_stated]
    eager = [r for r in resident if not r.fused]

    def middle(some: Sequence[Row]) -> str:
        return f"{100 * median(abs(r.error) for r in some):.1f} % over {len(some)} rows"

    def ends(some: Sequence[Row]) -> str:
        errors = [100 * r.error for r in some]
        return f"{min(errors):+.1f} to {max(errors):+.1f} % over {len(errors)} rows"

    steps, totals = ([r for r in resident if r.total is total] for total in (False, True))
    names = ", ".join(sorted({r.card for r in rows if not r.predicted_s}))
    other = sorted({(r.model, r.timestep) for r in known if r.timestep != preset(r.model).timestep})
    forms = "".join(
        f"* `{model}` is predicted with one timestep per {form}; its pipeline passes one per {preset(model).timestep}.\n"
        for model, form in other
    )
    counts = {r.model: preset(r.model).forwards for r in known}
    forwards = ", ".join(f"{count} for `{model}`" for model, count in sorted(counts.items()))
    return f"""# Published step times, compared with predictions

This page compares step times that others have published with the predictions of `chunkflow simulate` for the same model,
sizes, degree, attention kernel and lowering. Nothing was run for it; `make published` writes it.
[All rows](published_steps.csv) are available with their sources.

The median absolute error is {middle(fused)} of compiled or fused engines whose attention kernel is stated, and
{middle(eager)} of eager code.

**These are not predictions of unseen data.** Rows of this page were used to choose the share of the GEMM rate that models
reach (`eta_gemm`, for H100 and H200, A100, and the Ada GPUs) and the attention rate of the RTX 5090. The errors therefore
show how well one rate per type of work describes all rows. All other figures are from data sheets and measurements that
each profile names.

![predicted and published step times](published.png)

The compiled and fused rows whose attention kernel is stated:

{rows_table(fused)}

All rows without offload:

{groups_table(resident)}

* For single steps, and for the denoising loop alone, the error is {ends(steps)}.
* For totals that are divided by the number of steps, it is {ends(totals)}. These totals include the
  encoders, the decoder and host time, so they say less.
* With offload, it is {ends(streamed)}. These engines use other mechanisms than `layerwise`, which is
  predicted.
* The official code of Wan shards weights over several GPUs; the prediction includes an all-gather for each block.
  Quantized rows are predicted in bfloat16. If no attention kernel is stated, the default of the engine is assumed.
* A step runs as many forwards as the pipeline of the model: {forwards}.
{forms}\
* Not predicted, because there is no profile: {names or "none"}.
"""


def draw(found: Sequence[Row], path: Path) -> None:
    figure, axes = new_axes(7, 7)
    for label, some in (
        ("compiled or fused, single steps", [c for c in found if c.fused and not c.total]),
        ("compiled or fused, total / steps", [c for c in found if c.fused and c.total]),
        ("eager, single steps", [c for c in found if not c.fused and not c.total]),
        ("eager, total / steps", [c for c in found if not c.fused and c.total]),
    ):
        axes.scatter([c.seconds for c in some], [c.predicted_s for c in some], label=label, s=28, alpha=0.8)
    ends = [min(c.seconds for c in found) / 1.5, max(c.seconds for c in found) * 1.5]
    axes.plot(ends, ends, color="0.3", linewidth=1, label="prediction equals measurement")
    for factor in (0.8, 1.2):
        label = "prediction off by 20 %" if factor > 1 else None
        axes.plot(ends, [factor * e for e in ends], color="0.7", linewidth=1, linestyle="--", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="published step time, s",
        ylabel="predicted step time, s",
        title="Published and predicted step times, without offload",
    )
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.legend()
    save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rows", type=Path, default=ROWS, help="a file of rows like published_steps.csv")
    parser.add_argument("--page-only", action="store_true", help="make the page from the predictions in the file")
    parser.add_argument("--cache", type=Path, help="keep the traced problems in this file")
    arguments = parser.parse_args()
    rows = read(arguments.rows)
    if not arguments.page_only:
        known = [row for row in rows if row.hardware in profile_names()]
        problems = traces((row.traced for row in known), arguments.cache)
        keep(arguments.rows, (predict(r, problems[r.traced, r.fused]) if r in known else None for r in rows))
        rows = read(arguments.rows)
    draw([row for row in rows if row.predicted_s and not row.streams], arguments.out.with_suffix(".png"))
    arguments.out.write_text(page(rows))


if __name__ == "__main__":
    with errors_in_a_sentence():
        main()
