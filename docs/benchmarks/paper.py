"""The evaluation of the ChunkFlow paper (arXiv 2605.11335), point for point, from the simulator.

    python docs/benchmarks/paper.py [--out docs/benchmarks/paper.md] [--keep FOLDER]

Traces twelve configurations at full size without weights (about half a minute each), plans and plays each policy, and
writes the tables, the pictures beside them, and what must be true of them: it fails if something is not.
``--keep``: a folder that keeps the traced problems, and gives them back to the next run.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from paper_cases import CASES, CHUNK, DEGREE, MACHINE, MIB, Result, play, trace_all
from paper_pictures import draw_breakdown, draw_memory, draw_roofline, draw_steps
from paper_tables import (
    MEASURED,
    breakdown_table,
    chunk_table,
    claims,
    critical_table,
    equal_step_table,
    main_table,
    measured_table,
    residency_table,
    roofline_table,
)
from tqdm import tqdm

from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.hardware import Hardware


def document(results: list[Result], machine: Hardware, broken: list[str]) -> str:
    small = next(r for r in results if (r.case.model, r.case.size) == ("wan2.2-ti2v-5b", 41))
    wan = next(r for r in results if (r.case.model, r.case.size) == ("wan2.2-ti2v-5b", 81))
    fitted = "\n".join(f"* `{k}`: {v}" for k, v in machine.sources.items() if v.startswith("fitted"))
    measured, off = measured_table(results)
    met = "; ".join(off) or "they are"
    seconds = MEASURED[wan.case.model, wan.case.size]
    ratio = (
        seconds["layerwise-barrier"] / seconds["resident"],
        wan.step("layerwise-barrier") / wan.step("resident"),
    )
    held = "; ".join(broken) or f"holds in all {len(results)} configurations"
    return f"""# The paper's evaluation, from the simulator

Simulated on `{machine.name}` at Ulysses degree {DEGREE}, bfloat16, chunks of {CHUNK // MIB} MiB; full-size graphs of the
diffusers classes, traced without weights. Nothing here was run on a GPU. `make paper` makes this page and its pictures again.

Steps are denoising steps (Wan: two forwards). `layerwise` fetches the whole next block while a block computes;
`layerwise-barrier` moreover waits for it before the first all-to-all of each block, as the baseline of the paper's
reference code; `chunkflow` is the smallest plan within 2 % of all weights resident (the default); the last row is the
fastest plan in the memory that layerwise takes. Weights are arena and residents, slots cut.

{main_table(results)}

![simulated step time](paper_steps.png)
![weights on the device](paper_memory.png)

At the smallest sizes `chunkflow` reaches that step only by keeping half of the weights or more: a link that is too slow
cannot be hidden, only relieved. The other way round, at the step of layerwise:

{equal_step_table(results)}

## Against what was measured

{measured}

Constants fitted to that one configuration, once, and used for all:

{fitted}

The reference code sends 8 all-to-alls a block, of which 6 carry the latent; diffusers, which is simulated here, sends 4.
The last columns give every collective 1.5 times its bytes, as in the reference code. One configuration was measured, and
two constants were fitted to it: this is a check of consistency, not of the other eleven. The simulated ratio of the
two arms is {ratio[1]:.2f}, the measured one {ratio[0]:.2f}.

## Where the time goes

{breakdown_table(results)}

![breakdown](paper_breakdown.png)

## Chunk size

The fastest plan in layerwise's memory. The tail is the longest that a collective would wait for a chunk in flight; where
compute hides all copies, as at 81 frames, windows are filled so that none is, and only memory tells chunk sizes apart.

{chunk_table([small, wan], machine)}

## Residency

The smallest sizes, with a fixed share of chunks resident and all the room that hides the others. The planner finds the
share itself.

{residency_table(results, machine)}

## Roofline

{roofline_table(results, machine)}

![roofline](paper_roofline.png)

F is the FLOPs of a rank's block, I = F / bytes of its weights; I* is the knee, above which a block computes for longer than
its own copy takes, and F* = I* times the bytes. Here eta_comp is {machine.eta_comp}, fitted to a
whole step, so that the knee lies lower than with the paper's 0.60 and blocks hide earlier than its critical points
below say. The last column is of the whole step: copies and collectives share the link and together take no longer than
the resident step. It does not say that hiding is cheap: where blocks differ (the double blocks of FLUX and HunyuanVideo
carry more bytes than the single ones, in as much compute), copies must run far ahead, which takes memory.

## Critical points

From the paper's closed formulas and its constants (eta_comp 0.60, eta_pref 0.89), two ranks: the size at which F = F*. Its
B_pref are profiled and carry contention; the bytes of the weights are smaller.

{critical_table()}

## What must be true

* The default plan is within 2 % of resident (its goal) wherever copies and collectives fit the resident step; the plan
  in layerwise's memory is never slower than layerwise; the plan at layerwise's step is never larger: {held}.
* The two measured steps are met within 15 %: {met}.
"""


def main() -> int:
    parser = argparse.ArgumentParser(description="The paper's evaluation, from the simulator.")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".md"))
    parser.add_argument("--keep", type=Path, help="folder for the traced problems, read again by the next run")
    arguments = parser.parse_args()
    machine = load_profile(MACHINE)
    problems = trace_all(arguments.keep)
    pairs = list(zip(CASES, problems, strict=True))
    results = [play(case, problem, machine) for case, problem in tqdm(pairs, unit="case", desc="planning")]
    broken = claims(results)
    folder = arguments.out.parent
    draw_steps(results, folder / "paper_steps.png")
    draw_memory(results, folder / "paper_memory.png")
    draw_breakdown(results, folder / "paper_breakdown.png")
    draw_roofline(results, machine, folder / "paper_roofline.png")
    arguments.out.write_text(document(results, machine, broken))
    print(f"{arguments.out}: {len(results)} configurations")
    broken += measured_table(results)[1]
    for sentence in broken:
        print(f"not true: {sentence}", file=sys.stderr)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
