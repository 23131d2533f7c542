"""Several GPUs on one host: what each way to run a model on them reaches, predicted.

Traces each model without weights for each number of ranks, and plays it on each machine in all ways that ``chunkflow
simulate`` knows, and with weights on the ranks' devices (``--peers``).  Twenty minutes of one core, most of it tracing.

    python docs/benchmarks/several_gpus.py --out docs/benchmarks/several_gpus.md
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.presets import preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.graph.peers import on_peers, streamable
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, SHARDED
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.choice import to_peers
from chunkflow_compile.passes.placement.place import DEFAULT_SLOWDOWN, least_memory, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem, Region, RegionCost, Weight
from chunkflow_compile.simulate.sharded import play_sharded

# A profile, how many of its cards are in the host, and the memory of a card in GB, by its data sheet.
MACHINES = (
    ("h100-nvlink", 8, 80),
    ("a100-80gb-nvlink", 8, 80),
    ("l40s-pcie", 4, 48),
    ("rtx-4090-pcie", 2, 24),
    ("rtx-4090-pcie", 8, 24),
    ("rtx-5090-pcie", 2, 32),
)
# Title, preset, sizes other than its own.
MODELS: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("FLUX.1-dev", "flux.1-dev", {}),
    ("Qwen-Image", "qwen-image", {}),
    ("Wan2.2 A14B, 480p", "wan2.2-t2v-a14b", {"height": 480, "width": 832}),
    ("Wan2.2 A14B, 720p", "wan2.2-t2v-a14b", {}),
    ("HunyuanVideo", "hunyuanvideo", {}),
)
# Regions are cut at collectives only, and chunks are large: a tenth of the planning of the usual sizes.
GROUP_BYTES, CHUNK_BYTES = 1 << 40, 64 << 20
HOST_LEAST, HOST, PEERS_LEAST, PEERS, MIX = (
    "host, least memory",
    "host, in the bytes of distributed-layerwise",
    "peers, least memory",
    "peers, in the bytes of fsdp",
    "the mix, within 2 %",
)
# Less than this share of the bytes of all weights is a gain.
GAIN = 0.9


@dataclass(frozen=True)
class Reached:
    """Bytes of weights on each device, and seconds of a step."""

    nbytes: int
    step_s: float


# The profile and the number of its cards -> title of a model -> way -> what it reaches, or why there is none.
Found = dict[str, dict[str, dict[str, Reached | str]]]


def ways(cut: Cut, hardware: Hardware, ranks: int, calls: int) -> dict[str, Reached | str]:
    """What a model reaches on so many ranks in each way.  ``calls``: of the model in a step."""
    problem = cut.problem
    planned = partial(place, hardware=hardware, chunk_bytes=CHUNK_BYTES)

    def of(plan: Plan) -> Reached:
        assert plan.predicted is not None
        return Reached(plan.device_bytes, plan.predicted.step_s * calls)

    found: dict[str, Reached | str] = {
        "resident": of(planned(problem, policy="resident")),
        "layerwise": of(planned(problem, policy="layerwise")),
    }
    taken = {}
    for way in SHARDED:
        step = play_sharded(way, problem, hardware, ranks)
        found[way] = Reached(step.device_bytes, step.timeline.step_s * calls)
        taken[way] = step.device_bytes
    split, sharded = SHARDED
    least = least_memory(problem, hardware, CHUNK_BYTES)
    found[HOST_LEAST] = of(planned(problem, memory=least))
    found[HOST] = of(planned(problem, memory=max(least, taken[split])))
    if hardware.why_no_peers(ranks):
        found |= {PEERS_LEAST: "no peers", PEERS: "no peers"}
        found[MIX] = of(planned(problem, slowdown=DEFAULT_SLOWDOWN))
        return found
    pieces = on_peers(cut, streamable(cut), ranks).problem
    least = least_memory(pieces, hardware, CHUNK_BYTES)
    found[PEERS_LEAST] = of(planned(pieces, memory=least))
    found[PEERS] = of(planned(pieces, memory=max(least, taken[sharded])))
    slowed = partial(planned, slowdown=DEFAULT_SLOWDOWN)
    names = to_peers(cut, slowed, ranks, budget=False, host_rate=hardware.rate_beside_pulls(ranks))
    found[MIX] = of(slowed(on_peers(cut, names, ranks).problem))
    return found


def measure(cache: Path | None) -> Found:
    """All of :data:`MACHINES` and :data:`MODELS`.  ``cache``: a file that keeps what is done."""
    done = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    todo = [(model, ranks) for model in MODELS for ranks in sorted({ranks for _, ranks, _ in MACHINES})]
    for (title, name, sizes), ranks in tqdm(todo, desc="models and ranks"):
        machines = [profile for profile, count, _ in MACHINES if count == ranks]
        if all(title in done.get(label(profile, ranks), {}) for profile in machines):
            continue
        known = preset(name)
        traced = known.trace(ranks, replace(known.sizes, **sizes))
        cut = make_cut(replace(traced, fused=True), GROUP_BYTES)
        for profile in machines:
            reached = ways(cut, load_profile(profile), ranks, known.forwards)
            done.setdefault(label(profile, ranks), {})[title] = {
                way: asdict(r) if isinstance(r, Reached) else r for way, r in reached.items()
            }
        if cache is not None:
            cache.write_text(json.dumps(done))
    return {
        machine: {
            title: {way: r if isinstance(r, str) else Reached(**r) for way, r in reached.items()}
            for title, reached in models.items()
        }
        for machine, models in done.items()
    }


def label(profile: str, ranks: int) -> str:
    return f"{ranks} x {profile}"


def cell(reached: Reached | str, card: int) -> str:
    if isinstance(reached, str):
        return reached
    gigabytes = reached.nbytes / 1e9
    return f"{gigabytes:.1f} GB, {reached.step_s * 1e3:.0f} ms{', does not fit' if gigabytes > card else ''}"


def smallest(reached: Mapping[str, Reached | str], card: int) -> tuple[str, Reached] | None:
    """Of the ways that fit the card and take 1.02 times the resident step at most, the one of the fewest bytes."""
    base = reached["resident"]
    assert isinstance(base, Reached)
    able = [
        (way, r)
        for way, r in reached.items()
        if isinstance(r, Reached) and r.nbytes <= 1e9 * card and r.step_s <= DEFAULT_SLOWDOWN * base.step_s * (1 + 1e-6)
    ]
    return min(able, key=lambda pair: pair[1].nbytes, default=None)


def sentences(models: Mapping[str, Mapping[str, Reached | str]], card: int) -> str:
    """What is gained on a machine, a line a model."""
    lines = []
    for title, reached in models.items():
        base, best = reached["resident"], smallest(reached, card)
        assert isinstance(base, Reached)
        if best is None:
            fast = min(
                (r.step_s, way) for way, r in reached.items() if isinstance(r, Reached) and r.nbytes <= 1e9 * card
            )
            said = f"no way that fits has the resident step; the fastest is {fast[1]}, {fast[0] / base.step_s:.2f} times it"
        elif best[1].nbytes > GAIN * base.nbytes:
            said = (
                f"nothing is gained over all weights resident: at that step the least is {best[1].nbytes / 1e9:.1f} GB"
            )
        else:
            way, nbytes = best[0], best[1].nbytes
            said = f"the resident step in the fewest bytes: {way}, {nbytes / 1e9:.1f} of {base.nbytes / 1e9:.1f} GB"
        lines.append(f"* {title}: {said}.")
    split, whole = ([reached[way] for reached in models.values()] for way in (SHARDED[0], "layerwise"))
    slower = [
        title
        for title, a, b in zip(models, split, whole, strict=True)
        if isinstance(a, Reached) and isinstance(b, Reached) and a.step_s > b.step_s * 1.005
    ]
    if slower:
        lines.append(f"* Copying a part each and gathering it is slower than copying all: {', '.join(slower)}.")
    return "\n".join(lines)


def cosmos(step_s: float, hardware: Hardware, ranks: int) -> Problem:
    """Cosmos3-Super as far as it is published: 124 GB in 128 blocks, here equal ones; a call computes ``step_s``."""
    blocks, nbytes = 128, 124 * 10**9
    work = RegionCost(flops=round(step_s / blocks * hardware.flops("bfloat16")), dtype="bfloat16")
    weights = tuple(
        Weight(
            name=f"w{b}", names=(f"w{b}",), index=b, nbytes=nbytes // blocks, dtype="bfloat16",
            shape=(nbytes // blocks // 2,), stride=(1,), uses=(b,), keep=None,
        )
        for b in range(blocks)
    )  # fmt: skip
    regions = tuple(
        Region(index=b, name=f"region_{b}", key="", block=f"blocks.{b}", nodes=1, weights=(f"w{b}",), cost=work)
        for b in range(blocks)
    )
    return Problem(regions=regions, collectives=(), weights=weights, ranks=ranks)


def published() -> str:
    """What vLLM's blog of 2026-07-30 has of four B300, beside predictions."""
    rows = []
    for clip, layerwise, split, sharded in (("29 frames, 480p", 81.46, 30.79, 15.38), ("241, 720p", 0, 214.53, 210.05)):
        steps, ranks, machine = 35, 4, load_profile("b200")
        problem = cosmos(sharded / steps, machine, ranks)
        plan = place(problem, machine, policy="layerwise", chunk_bytes=DEFAULT_CHUNK_BYTES)
        assert plan.predicted is not None
        predicted = {"layerwise": plan.predicted.step_s}
        predicted |= {way: play_sharded(way, problem, machine, ranks).timeline.step_s for way in SHARDED}
        for (way, step_s), told in zip(predicted.items(), (layerwise, split, sharded), strict=True):
            rows.append((clip, way, f"{told / steps:.2f} s" if told else "", f"{step_s:.2f} s"))
    return tabulate(rows, headers=("clip", "way", "published, a step", "predicted"), tablefmt="github")


def page(found: Found) -> str:
    parts = []
    for profile, ranks, card in MACHINES:
        models = {title: found[label(profile, ranks)][title] for title, _, _ in MODELS}
        rows = [[way, *(cell(r[way], card) for r in models.values())] for way in next(iter(models.values()))]
        why = load_profile(profile).why_no_peers(ranks)
        note = f"\n\nNo peers: {why}" if why else ""
        shown = tabulate(rows, headers=("way", *models), tablefmt="github")
        parts.append(f"## {label(profile, ranks)}, {card} GB each\n\n{shown}{note}\n\n{sentences(models, card)}\n")
    body = "\n".join(parts)
    models = "; ".join(f"{title}: {replace(preset(name).sizes, **sizes)}" for title, name, sizes in MODELS)
    return f"""# Several GPUs on one host: what each way reaches

Predicted by `chunkflow simulate`'s own functions; **no figure of the tables by machine is measured**. GB of weights on each
card, and ms a step, of all calls in it. The ranks are those of Ulysses, all GPUs of the host. Activations are not counted;
"does not fit" is said where the weights alone are more than a card. Of Wan2.2 A14B a step runs one of two experts, and that
one is counted. Written by `make several-gpus`.

* `resident`, `layerwise`, `distributed-layerwise` (DLO) and `fsdp` (HSDP) are [the policies](../planning.md#simulation) of
  `chunkflow simulate`; the last two are [other systems' ways](../planning.md#how-other-systems-use-several-gpus), without
  the copies on the device around gathers and the host's work, which make their steps longer.
* "host" is this project's plan with weights in host memory, in the least memory and in as much as `distributed-layerwise`
  takes.
* "peers" is it with [weights in pieces on the ranks' devices](../guide.md#weights-on-the-devices-of-other-ranks) (`--peers`),
  in the least memory and in as much as `fsdp` takes.
* "the mix" is the smallest plan within 1.02 times the resident step, of weights on the device, on the ranks' devices and in
  host memory (`--peers auto`).

Regions are cut at collectives only, for all ways; chunks are of {CHUNK_BYTES >> 20} MiB. What the ranks share of the host's
memory, `host_bandwidth` of each profile, is an assumption for all but the H100's host; so are the rates of pulls.
Sizes: {models}.

{body}
## Beside published figures

Cosmos3-Super, 124 GB in 128 blocks, on four B300 with Ulysses, 35 steps (vLLM's blog of 2026-07-30; time of a whole clip over
steps, so encoder and decoder are in it). Only sizes are known here: equal blocks, no exchanges, the profile `b200`, and as
much compute as makes `fsdp` what was published, so that row is no prediction.

{published()}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep what is done in this file, and go on from it")
    arguments = parser.parse_args()
    quiet_diffusers()
    arguments.out.write_text(page(measure(arguments.cache)))


if __name__ == "__main__":
    main()
