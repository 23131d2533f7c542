"""Where the first step goes: ChunkFlow beside plain torch.compile and diffusers' compile_repeated_blocks, by one clock.

    python docs/benchmarks/first_step.py [--repeats 5] [--models wan-24,flux-19+38] [--out docs/benchmarks/first_step.md]

Each run is a process of its own: first with empty caches, then with the caches that it left; and with what it saved
(torch's mega-cache) and caches that are empty again, once.  The arms of a model run in turns, in
random order.  ChunkFlow streams: its budget is half of the bytes of the weights.  Phases are what torch's own timer of
compilations (torch._dynamo.utils.dynamo_timed) has counted, in which ChunkFlow's passes count too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
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
from runs import in_a_process
from tabulate import tabulate
from torch import nn

from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.report.first_step import first_step_phases

# In narrow models, large are the weights that are so in those of full width, where 1 MiB and more is: those of the blocks, of
# the embeddings of time and text, and of modulated norms, but no rotary tables, patch embeddings or last projections.
MIN_BYTES = 8192
PLAIN, REPEATED = "torch.compile, whole", "diffusers, repeated blocks"
WHOLE, BY_KIND = "chunkflow, whole", "chunkflow, by kind"
ARMS = (PLAIN, REPEATED, WHOLE, BY_KIND)
# What a process finds: no caches, those of the process before it, or what that one has saved.
COLD, SECOND, LOADED = "empty caches", "second process", "loaded"
# Plain torch.compile takes minutes, so it and its counterpart run once.
ONCE = (PLAIN, WHOLE)
MODELS: Mapping[str, tuple[str, Size]] = {
    "wan-20": ("wan", Size(layers=20)),
    "wan-24": ("wan", Size(layers=24)),
    "wan-40": ("wan", Size(layers=40)),
    "wan-60": ("wan", Size(layers=60)),
    "flux-19+38": ("flux", Size(layers=19, singles=38)),
}
# What torch's timer calls the work of its own compiler after Dynamo; in ours, it is inside lowering.
OF_TORCH = ("create_aot_dispatcher_function", "AOTAutogradCache.inductor_load")


def compiled(arm: str, model: nn.Module) -> Any:
    """A model, ready for its first call."""
    if arm == PLAIN:
        return torch.compile(model, fullgraph=True)
    if arm == REPEATED:
        model.compile_repeated_blocks(fullgraph=True)  # type: ignore[operator]
        return model
    import chunkflow_compile

    budget = sum(p.nbytes for p in model.parameters()) // 2
    if arm == WHOLE:
        options = {"min_bytes": MIN_BYTES, "memory": budget}
        return torch.compile(model, backend="chunkflow", fullgraph=True, options=options)
    return chunkflow_compile.compile(model, min_bytes=MIN_BYTES, memory=budget)


def once(arm: str, name: str, saved: Path, state: str, started: float) -> dict[str, Any]:
    """One process, which started then.  ``saved``: what a cold process leaves there, and another one loads."""
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


def measure(names: list[str], repeats: int, once_each: bool) -> dict[str, dict[str, dict[str, list[dict[str, Any]]]]]:
    """Model -> arm -> what the process finds -> a result for each run."""
    order = [(n, a) for n in names for a in (REPEATED, BY_KIND) for _ in range(repeats)]
    order += [(n, a) for n in names for a in ONCE if once_each]
    random.Random(0).shuffle(order)
    found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]] = {}
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
    """What each phase took; "the rest" is what no phase has counted."""
    timer = result["timer"]
    found = dict(first_step_phases({name: [seconds] for name, seconds in timer.items()}))
    if "chunkflow.program" not in timer:
        found["AOTAutograd and Inductor"] = sum(timer.get(name, 0.0) for name in OF_TORCH)
    return {**found, "the rest": result["total"] - sum(found.values())}


def medians(results: list[dict[str, Any]], of: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(of(result) for result in results)


def totals_table(found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]]) -> str:
    rows = []
    for name, arms in found.items():
        for arm in (a for a in ARMS if a in arms):
            base = arms.get(PLAIN if arm == WHOLE else REPEATED)
            row = [name, arm]
            for state in (s for s in (COLD, SECOND, LOADED) if s in arms[arm]):
                seconds = medians(arms[arm][state], lambda r: r["total"])
                row.append(f"{seconds:.1f} s")
                if arm in (WHOLE, BY_KIND) and base is not None:
                    row[-1] += f" ({seconds / medians(base[state], lambda r: r['total']):.2f})"
            cold = arms[arm][COLD]
            row += [""] * (LOADED not in arms[arm])
            row += [f"{medians(cold, lambda r: r['peak']) / 2**20:.0f} MiB", cold[0]["compilations"], len(cold)]
            rows.append(row)
    headers = ("model", "arm", COLD, SECOND, LOADED, "host memory", "graphs", "runs")
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def phases_table(arms: dict[str, dict[str, list[dict[str, Any]]]], names: tuple[str, ...]) -> str:
    columns = [(arm, state) for arm in names if arm in arms for state in (COLD, SECOND)]
    cells = {(arm, state): [{**before(r), **phase_seconds(r)} for r in arms[arm][state]] for arm, state in columns}
    phases = dict.fromkeys(phase for results in cells.values() for r in results for phase in r)
    phases.pop("the rest")
    rows = []
    for phase in (*phases, "the rest"):
        row = [phase]
        for column in columns:
            values = [r[phase] for r in cells[column] if phase in r]
            row.append(f"{statistics.median(values):.2f}" if values else "")
        rows.append(row)
    headers = ("seconds", *(f"{arm}, {state}" for arm, state in columns))
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def before(result: dict[str, Any]) -> dict[str, float]:
    """The phases before the call of the compiler."""
    return {f"({name})": result[name] for name in ("imports", "models")}


def page(found: dict[str, dict[str, dict[str, list[dict[str, Any]]]]]) -> str:
    text = "# The first step\n\n"
    text += f"{date.today()}, torch {torch.__version__}, diffusers {diffusers.__version__}, {os.cpu_count()} CPU cores "
    text += f"({platform.machine()}), no GPU. Narrow models, random weights, float32. Written by `make first-step`.\n\n"
    text += (
        "From the call of the compiler to the first output, medians, in turns and in random order, each run in a process of\n"
        "its own. In brackets: the ratio to diffusers' `compile_repeated_blocks`; for the whole model, to plain\n"
        "`torch.compile`. *Loaded*: with other, empty caches, and what the first process saved (torch's mega-cache).\n"
        "ChunkFlow streams within half of the bytes of the weights. Host memory: what the first\n"
        "process needed at most above what it had before.\n\n"
    )
    text += totals_table(found) + "\n"
    for name, arms in found.items():
        for pair in ((REPEATED, BY_KIND), (PLAIN, WHOLE)):
            if set(pair) <= arms.keys():
                text += f"\n## {name}: {pair[0]}, and {pair[1]}\n\n{phases_table(arms, pair)}\n"
    return text + (
        "\nLines in brackets come before the call, and are no part of the totals. What runs in a thread beside the phases,\n"
        "such as the search for the CPU's vector instructions, counts where a phase waits for it.\n\n"
        "Of a model compiled whole, Dynamo and AOTAutograd trace every block, so their time grows with their number;\n"
        "lowering takes as long as its kinds of region need. By kind, one block of each kind is traced.\n"
    )


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
    print(text := page(found))
    if given.out:
        given.out.write_text(text)
        given.out.with_suffix(".json").write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main()
