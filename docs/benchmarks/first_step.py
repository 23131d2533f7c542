"""Measure the time of the first step with ChunkFlow, torch.compile and diffusers' compile_repeated_blocks.

    python docs/benchmarks/first_step.py [--repeats 5] [--models wan-24,flux-19+38] [--out docs/benchmarks/first_step.md]

Each run is a separate process.  The first process starts with empty caches, the second one with the caches that the first
one left, and a third one with empty caches and the artifacts that the first one saved (torch's mega-cache).  The arms of
a model run in random order.  ChunkFlow streams weights: its budget is half of the bytes of all weights.  The durations of
phases are measured by torch.compile's own timer (torch._dynamo.utils.dynamo_timed), which ChunkFlow's passes use, too.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import diffusers
import torch
from runs import in_a_process, put_section
from tabulate import tabulate
from torch import nn

from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.report.first_step import first_step_phases

# With this limit, the same weights of a narrow model count as large as at full width with 1 MiB: the weights of blocks,
# of the embeddings of time and text, and of modulated norms, but no rotary tables, patch embeddings or last projections.
MIN_BYTES = 8192
PLAIN, REPEATED = "torch.compile, whole", "diffusers, repeated blocks"
WHOLE, BY_KIND = "chunkflow, whole", "chunkflow, by kind"
ARMS = (PLAIN, REPEATED, WHOLE, BY_KIND)
# The caches that a process starts with: none, the caches that the first process left, or the artifacts that it saved.
COLD, SECOND, LOADED = "empty caches", "second process", "loaded"
# The arms that run once.  torch.compile takes minutes for a whole model, and its counterpart runs as often.
ONCE = (PLAIN, WHOLE)
MODELS: Mapping[str, tuple[str, Size]] = {
    "wan-20": ("wan", Size(layers=20)),
    "wan-24": ("wan", Size(layers=24)),
    "wan-40": ("wan", Size(layers=40)),
    "wan-60": ("wan", Size(layers=60)),
    "flux-19+38": ("flux", Size(layers=19, singles=38)),
}
# The minimum duration in seconds of the phases that the page lists.
LEAST_S = 0.25
# Results by model, arm and state of the caches: one per run.
Found = dict[str, dict[str, dict[str, list[dict[str, Any]]]]]
BY_KIND_TEXT = """\
{today}, torch {torch}, diffusers {diffusers}, {cores} CPU cores, no GPU; `make first-step`. [All runs](first_step.json).

* The models are narrow, with random weights in float32. Times are from the call of the compiler to the first output. They are
  medians of {runs} runs, each in a separate process. Numbers in parentheses are ratios to diffusers.
* `by kind` compiles each [block type](../glossary.md#block-type) once, like diffusers' `compile_repeated_blocks`. ChunkFlow
  streams the weights, with a [budget](../glossary.md#budget) of half of their bytes.
* *Second process* starts with the caches that the first process left. *Loaded* starts with empty caches and loads the
  artifacts that the first process saved (torch's mega-cache).
* *Host memory* is the growth of the peak memory of the first process.

```
{table}
```

The longest phases of `chunkflow, by kind`, in seconds:

{phases}"""
WHOLE_TEXT = """\
{today}, torch {torch}. Each figure is from one run.

```
{table}
```

Here, Dynamo and AOTAutograd trace every block. In the first section, they trace one block of each block type."""
# The timers of torch's compiler stages after Dynamo.  With ChunkFlow, these stages are part of lowering.
OF_TORCH = ("create_aot_dispatcher_function", "AOTAutogradCache.inductor_load")


def compiled(arm: str, model: nn.Module) -> Any:
    """Return a model that is ready for the first call."""
    if arm == PLAIN:
        return torch.compile(model, fullgraph=True)
    if arm == REPEATED:
        model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
        return model
    import chunkflow_compile

    budget = sum(p.nbytes for p in model.parameters()) // 2
    if arm == WHOLE:
        options = {"min_bytes": MIN_BYTES, "weight_memory": budget}
        return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    return chunkflow_compile.compile(model, min_bytes=MIN_BYTES, weight_memory=budget)


def once(arm: str, name: str, saved: Path, state: str, started: float) -> dict[str, Any]:
    """Run one measurement in this process; return its figures.  ``saved``: a file of artifacts, which the process with
    empty caches writes and a later process loads.  ``state``: the caches that this process starts with.  ``started``: the
    time at which this process was started."""
    imports, begun = time.time() - started, time.perf_counter()
    family, size = MODELS[name]
    model, inputs = small_model(family, size), small_inputs(family, size, 0)
    twin = small_model(family, size)
    built, held = time.perf_counter(), peak_bytes()
    if state == LOADED:
        assert torch.compiler.load_cache_artifacts(saved.read_bytes()) is not None
    with torch.no_grad():
        run = compiled(arm, model)
        prepared = time.perf_counter()
        output = run(**inputs)[0]
        ended = time.perf_counter()
        peak = peak_bytes() - held
        torch.testing.assert_close(output, twin(**inputs)[0], atol=1e-3, rtol=1e-2)
    counted = {key: round(sum(values), 3) for key, values in torch._dynamo.utils.compilation_time_metrics.items()}
    timer = {key: seconds for key, seconds in counted.items() if seconds >= 0.01}
    moved = 0
    if arm in (WHOLE, BY_KIND):
        from chunkflow_compile.placed.placement import placement_of

        placement = placement_of(model)
        assert placement is not None
        moved = placement.store.counts.moved_bytes
        assert moved > 0, "nothing streams"
    if state == COLD and (artifacts := torch.compiler.save_cache_artifacts()) is not None:
        saved.write_bytes(artifacts[0])
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return {
        "imports": imports,
        "models": built - begun,
        "prepare": prepared - built,
        "call": ended - prepared,
        "total": ended - built,
        "children_cpu": used[1].ru_utime + used[1].ru_stime,
        "peak": peak,
        "moved": moved,
        "timer": timer,
        "compilations": torch._dynamo.utils.counters["stats"].get("unique_graphs", 0),
    }


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(names: list[str], repeats: int, once_each: bool) -> Found:
    """Run all measurements in random order.  ``once_each``: whether to run the arms in ONCE, too."""
    order = [(n, a) for n in names for a in (REPEATED, BY_KIND) for _ in range(repeats)]
    order += [(n, a) for n in names for a in ONCE if once_each]
    random.Random(0).shuffle(order)
    found: Found = {}
    for number, (name, arm) in enumerate(order, 1):
        with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryDirectory() as other:
            seen = LOADED in found.get(name, {}).get(arm, {})
            for state in (COLD, SECOND) if arm in ONCE or seen else (COLD, SECOND, LOADED):
                place = other if state == LOADED else cache
                of_it = ("--once", arm, "--models", name, "--state", state, "--saved", f"{cache}/saved")
                result = in_a_process(__file__, (*of_it, "--started", str(time.time())), place)
                found.setdefault(name, {}).setdefault(arm, {}).setdefault(state, []).append(result)
                print(
                    f"{number}/{len(order)} {name}, {arm}, {state}: {result['total']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return found


def phase_seconds(result: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of each phase.  The phase "other" is the time outside all other phases."""
    timer = result["timer"]
    found = dict(first_step_phases({name: [seconds] for name, seconds in timer.items()}))
    if "chunkflow.program" not in timer:
        found["AOTAutograd and Inductor"] = sum(timer.get(name, 0.0) for name in OF_TORCH)
    return {**found, "other": result["total"] - sum(found.values())}


def medians(results: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(of(result) for result in results)


def totals_table(arms_of: Found, arms: tuple[str, ...]) -> str:
    """Return a table of the seconds until the first output.  In parentheses: the ratio to the first of the two arms.  The
    last column shows the host memory of processes with empty caches."""
    rows = []
    states = [s for s in (COLD, SECOND, LOADED) if any(s in of[a] for of in arms_of.values() for a in arms if a in of)]
    for name, found in arms_of.items():
        for arm in (a for a in arms if a in found):
            base, row = found.get(arms[0]), [name, arm]
            for state in states:
                seconds = medians(found[arm][state], lambda r: r["total"])
                ratio = base is not None and arm != arms[0]
                row.append(
                    f"{seconds:.1f} s" + (f" ({seconds / medians(base[state], lambda r: r['total']):.2f})" * ratio)
                )
            rows.append([*row, f"{medians(found[arm][COLD], lambda r: r['peak']) / 2**20:.0f} MiB"])
    return tabulate(rows, headers=("model", "arm", *states, "host memory"), disable_numparse=True)


def longest_phases(arm: Mapping[str, list[dict[str, Any]]]) -> str:
    """Return the phases of an arm that take at least LEAST_S, for each state of the caches.  The longest phase comes
    first."""
    text = []
    for state in (COLD, SECOND):
        results = [phase_seconds(r) for r in arm[state]]
        taken = {phase: statistics.median(r.get(phase, 0.0) for r in results) for phase in results[0]}
        longest = sorted((seconds, phase) for phase, seconds in taken.items() if seconds >= LEAST_S)[::-1]
        text.append(f"{state}: " + ", ".join(f"{phase} {seconds:.2f}" for seconds, phase in longest))
    return ";\n  ".join(text)


def by_kind_section(found: Found) -> str:
    return BY_KIND_TEXT.format(
        today=date.today(),
        torch=torch.__version__,
        diffusers=diffusers.__version__,
        cores=os.cpu_count(),
        runs=max(len(arms[BY_KIND][COLD]) for arms in found.values()),
        table=totals_table(found, (REPEATED, BY_KIND)),
        phases="\n".join(f"* {name}: {longest_phases(arms[BY_KIND])}." for name, arms in found.items()),
    )


def whole_section(found: Found) -> str:
    table = totals_table(found, (PLAIN, WHOLE))
    return WHOLE_TEXT.format(today=date.today(), torch=torch.__version__, table=table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="wan-24,wan-40,flux-19+38", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--no-whole", action="store_true", help="leave out the arms that compile the whole model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--once", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--state", help=argparse.SUPPRESS)
    parser.add_argument("--saved", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.once:
        print(json.dumps(once(given.once, given.models, given.saved, given.state, given.started)))
        return
    found = measure(given.models.split(","), given.repeats, not given.no_whole)
    sections = {"Each block type compiled once": by_kind_section(found)}
    if not given.no_whole:
        sections["Whole model as one graph"] = whole_section(found)
    print(*sections.values(), sep="\n\n")
    if given.out:
        for heading, text in sections.items():
            put_section(given.out, "Time of the first step", heading, text)
        given.out.with_suffix(".json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
