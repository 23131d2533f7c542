"""Predict the memory and the step time of each method to run a model on several GPUs of one host.

The script traces each model without weights for each number of ranks.  It simulates the model on each machine with all
methods of ``chunkflow simulate``, and with weights on the GPUs of other ranks (``--peers``).  This takes twenty minutes
on one core, mostly for tracing.

    python docs/benchmarks/several_gpus.py --out docs/benchmarks/several_gpus.md

The script writes all figures as JSON next to the page, and makes the page and its picture from the JSON.  With
``--page-only``, it makes the page and the picture from existing JSON.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from methods import CHUNK_BYTES, GROUP_BYTES, transformer_traced, with_peers
from runs import errors_in_a_sentence, saved
from tabulate import tabulate
from tqdm import tqdm

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.goal import DEFAULT_SLOWDOWN, Goal
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.shard import on_peers, streamable
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, GROUP_OFFLOAD, SHARDED
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.problem import Problem, Region, RegionCost, Weight
from chunkflow_compile.report.pictures import new_axes, save_figure
from chunkflow_compile.simulate.group_offload import play_group_offload
from chunkflow_compile.simulate.sharded import play_sharded

# For each machine: a profile, the number of GPUs, and the memory of one GPU in GB according to its data sheet.
MACHINES = (
    ("h100-nvlink", 8, 80),
    ("a100-80gb-nvlink", 8, 80),
    ("l40s-pcie", 4, 48),
    ("rtx-4090-pcie", 2, 24),
    ("rtx-4090-pcie", 8, 24),
    ("rtx-5090-pcie", 2, 32),
)
# For each model: a title, a preset, and the sizes that differ from the preset's sizes.
MODELS: tuple[tuple[str, str, Mapping[str, int]], ...] = (
    ("FLUX.1-dev", "flux.1-dev", {}),
    ("Qwen-Image", "qwen-image", {}),
    ("Wan2.2 5B", "wan2.2-ti2v-5b", {}),
    ("Wan2.2 A14B, 480p", "wan2.2-t2v-a14b", {"height": 480, "width": 832}),
    ("Wan2.2 A14B, 720p", "wan2.2-t2v-a14b", {}),
    ("HunyuanVideo", "hunyuanvideo", {}),
)
HOST_LEAST, HOST, HOST_MOST, PEERS_LEAST, PEERS, MIX = (
    "host, least memory",
    "host, in the bytes of distributed-layerwise",
    "host, in the memory of the GPU",
    "peers, least memory",
    "peers, in the bytes of fsdp",
    "the mix, within 2 %",
)
# The GPU memory that is reserved for the CUDA context, the workspaces of libraries and fragmentation.
RESERVED_BYTES = 2 << 30
# A method counts as saving memory if it needs at most this share of the bytes of all weights.
GAIN = 0.9
# The methods on the page and in the picture: heading and color.
SHOWN = {
    "resident": ("baseline", "#999999"),
    HOST: ("ChunkFlow, host", "#2a6f97"),
    PEERS: ("ChunkFlow, peers", "#8fb996"),
    MIX: ("ChunkFlow, mix", "#b5523b"),
    SHARDED[0]: ("DLO", "#e0a458"),
    SHARDED[1]: ("HSDP", "#6a4c93"),
}
MARKERS = ("o", "s", "P", "v", "^", "D")


@dataclass(frozen=True)
class Reached:
    """The figures of a method: the bytes of weights on each GPU, and the seconds of one forward."""

    nbytes: int
    forward_s: float


# The figures by machine, title of the model, and method.  A method that is not possible has a reason instead of figures.
Found = dict[str, dict[str, dict[str, Reached | str]]]


def workloads() -> dict[str, Workload]:
    """Return the workloads to plan, by title."""
    return {title: preset(name).workload(replace(preset(name).sizes, **sizes)) for title, name, sizes in MODELS}


def ways(cut: Cut, hardware: Hardware, ranks: int, room: int) -> dict[str, Reached | str]:
    """Return the figures of a model on ``ranks`` ranks by method.  ``room``: the bytes of GPU memory that are available
    for weights."""
    problem = cut.problem
    planned = partial(place, hardware=hardware, chunk_bytes=CHUNK_BYTES)

    def of(plan: Plan) -> Reached:
        assert plan.predicted is not None
        return Reached(plan.device_bytes, plan.predicted.step_s)

    found: dict[str, Reached | str] = {
        "resident": of(planned(problem, goal=Goal(policy="resident"))),
        "layerwise": of(planned(problem, goal=Goal(policy="layerwise"))),
    }
    taken = {}
    for way in SHARDED:
        step = play_sharded(way, problem, hardware, ranks)
        found[way] = Reached(step.device_bytes, step.timeline.step_s)
        taken[way] = step.device_bytes
    split, sharded = SHARDED
    least = least_memory(problem, hardware, CHUNK_BYTES)
    found[HOST_LEAST] = of(planned(problem, goal=Goal(memory=least)))
    found[HOST] = of(planned(problem, goal=Goal(memory=max(least, taken[split]))))
    found[HOST_MOST] = (
        of(planned(problem, goal=Goal(memory=room))) if least <= room else f"needs {least} bytes, of {room}"
    )
    group = play_group_offload(problem, hardware)
    found[GROUP_OFFLOAD] = Reached(group.device_bytes, group.timeline.step_s)
    if hardware.why_no_peers(ranks):
        found |= {PEERS_LEAST: "no peers", PEERS: "no peers"}
    else:
        pieces = on_peers(cut, streamable(cut), ranks).problem
        least = least_memory(pieces, hardware, CHUNK_BYTES)
        found[PEERS_LEAST] = of(planned(pieces, goal=Goal(memory=least)))
        found[PEERS] = of(planned(pieces, goal=Goal(memory=max(least, taken[sharded]))))
    slowed = partial(planned, goal=Goal(slowdown=DEFAULT_SLOWDOWN))
    found[MIX] = of(slowed(with_peers(cut, hardware, ranks, slowed)))
    return found


def measure(cache: Path | None) -> Found:
    """Return the figures of all machines and models.  ``cache``: a file in which finished results are kept, or None."""
    done = json.loads(cache.read_text()) if cache is not None and cache.exists() else {}
    todo = [(case, ranks) for case in workloads().items() for ranks in sorted({ranks for _, ranks, _ in MACHINES})]
    for (title, workload), ranks in tqdm(todo, desc="models and ranks"):
        machines = [(profile, card) for profile, count, card in MACHINES if count == ranks]
        if all(title in done.get(label(profile, ranks), {}) for profile, _ in machines):
            continue
        known = preset(workload.model)
        cut = make_cut(transformer_traced(known, workload.sizes, ranks), GROUP_BYTES)
        activations = cut.problem.live_bytes
        for profile, card in machines:
            reached = ways(cut, load_profile(profile), ranks, card * 10**9 - RESERVED_BYTES - activations)
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


def smallest(reached: Mapping[str, Reached | str], card: int) -> tuple[str, Reached] | None:
    """Return the method with the fewest bytes among the methods that fit on the GPU and whose forward takes at most 1.02
    times as long as the baseline; None if there is none."""
    base = reached["resident"]
    assert isinstance(base, Reached)
    able = [
        (way, r)
        for way, r in reached.items()
        if isinstance(r, Reached)
        and r.nbytes <= 1e9 * card
        and r.forward_s <= DEFAULT_SLOWDOWN * base.forward_s * (1 + 1e-6)
    ]
    return min(able, key=lambda pair: pair[1].nbytes, default=None)


def fastest(reached: Mapping[str, Reached | str], card: int) -> tuple[str, Reached]:
    """Return the method with the shortest forward among the methods that fit on the GPU."""
    able = [(way, r) for way, r in reached.items() if isinstance(r, Reached) and r.nbytes <= 1e9 * card]
    return min(able, key=lambda pair: (pair[1].forward_s, pair[0]))


def figures(found: Found) -> dict[str, Any]:
    """Return all figures for the JSON file: GB and ms by machine, model and method, and the results of :func:`smallest`
    and :func:`fastest`."""
    machines: dict[str, Any] = {}
    for profile, ranks, card in MACHINES:
        models = {}
        for title, _, _ in MODELS:
            reached = found[label(profile, ranks)][title]
            base, best = reached["resident"], smallest(reached, card)
            assert isinstance(base, Reached)
            fast, quickest = fastest(reached, card)
            models[title] = {
                "ways": {
                    way: r if isinstance(r, str) else {"GB": round(r.nbytes / 1e9, 1), "ms": round(r.forward_s * 1e3)}
                    for way, r in reached.items()
                },
                "resident step in the fewest bytes": best and best[0],
                "gained": best is not None and best[1].nbytes <= GAIN * base.nbytes,
                **(
                    {}
                    if best
                    else {"fastest": fast, "times the resident step": round(quickest.forward_s / base.forward_s, 2)}
                ),
            }
        why = load_profile(profile).why_no_peers(ranks)
        machines[label(profile, ranks)] = {"card, GB": card, "why no peers": why, "models": models}
    called = {title: asdict(workload) for title, workload in workloads().items()}
    return {"workloads": called, "machines": machines, "published of Cosmos3-Super": published()}


def as_text(found: Mapping[str, Any]) -> str:
    """Return the figures as JSON, with one method per line."""
    text = json.dumps(found, indent=1)
    return re.sub(r"\{\s+(\"GB\": [\d.]+,)\s+(\"ms\": \d+)\s+\}", r"{\1 \2}", text) + "\n"


def cosmos(step_s: float, hardware: Hardware, ranks: int) -> Problem:
    """Return a problem for Cosmos3-Super according to the published facts: 124 GB in 128 blocks.  The blocks are assumed
    to be equal, and to compute for ``step_s`` seconds in total."""
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


def published() -> list[dict[str, Any]]:
    """Return the figures that vLLM's blog published on 2026-07-30 for four B300 GPUs, with predictions."""
    rows = []
    for clip, layerwise, split, sharded in (("29 frames, 480p", 81.46, 30.79, 15.38), ("241, 720p", 0, 214.53, 210.05)):
        steps, ranks, machine = 35, 4, load_profile("b200")
        problem = cosmos(sharded / steps, machine, ranks)
        plan = place(problem, machine, Goal(policy="layerwise"), chunk_bytes=DEFAULT_CHUNK_BYTES)
        assert plan.predicted is not None
        predicted = {"layerwise": plan.predicted.step_s}
        predicted |= {way: play_sharded(way, problem, machine, ranks).timeline.step_s for way in SHARDED}
        for (way, step_s), told in zip(predicted.items(), (layerwise, split, sharded), strict=True):
            measured = round(told / steps, 2) if told else None
            rows.append({"clip": clip, "way": way, "published, s": measured, "predicted, s": round(step_s, 2)})
    return rows


def table(machine: Mapping[str, Any], called: Mapping[str, Workload]) -> str:
    """Return the table of a machine, with one row per model and one cell ``GB/ms`` per method in SHOWN.  The result of
    :func:`smallest` is bold."""
    first = next(iter(machine["models"].values()))["ways"]
    shown = [way for way in SHOWN if not isinstance(first[way], str)]
    rows = []
    for title, model in machine["models"].items():
        ways, least = model["ways"], model["resident step in the fewest bytes"]
        cells = []
        for way in shown:
            reached = ways[way]
            text = f"{reached['GB']}/{reached['ms']}{'!' if reached['GB'] > machine['card, GB'] else ''}"
            cells.append(f"**{text}**" if model["gained"] and reached == ways[least] else text)
        rows.append([title, called[title].forwards, *cells])
    headers = ("GB/ms", "forwards per step", *(SHOWN[way][0] for way in shown))
    return tabulate(rows, headers=headers, tablefmt="github", disable_numparse=True)


def unmet(machine: Mapping[str, Any]) -> str:
    """Return sentences about the models for which no method saves memory at the speed of the baseline, or for which no
    method that fits is as fast as the baseline."""
    told = []
    nothing = [t for t, m in machine["models"].items() if m["resident step in the fewest bytes"] and not m["gained"]]
    if nothing:
        told.append(f"No method needs less memory at the speed of the baseline: {'; '.join(nothing)}.")
    for title, model in machine["models"].items():
        if model["resident step in the fewest bytes"] is None:
            fast, times = model["fastest"], model["times the resident step"]
            fast = SHOWN.get(fast, (fast,))[0]
            told.append(
                f"{title}: no method that fits is as fast as the baseline. The fastest ({fast}) takes {times} times as long."
            )
    slower = [
        title
        for title, model in machine["models"].items()
        if model["ways"][SHARDED[0]]["ms"] > 1.005 * model["ways"]["layerwise"]["ms"]
    ]
    if slower:
        told.append(f"DLO is slower than `layerwise` for: {'; '.join(slower)}.")
    return "\n".join(told)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Draw a panel per machine, with a point per model and method."""
    figure, axes = new_axes(12, 7, columns=3, heights=(1.0, 1.0))
    for panel, (name, machine) in zip(axes.flat, found["machines"].items(), strict=True):
        for marker, model in zip(MARKERS, machine["models"].values(), strict=True):
            base = model["ways"]["resident"]["ms"]
            for way, (_, color) in SHOWN.items():
                if not isinstance(reached := model["ways"][way], str):
                    fits = reached["GB"] <= machine["card, GB"]
                    face = color if fits else "none"
                    panel.plot(
                        reached["GB"],
                        reached["ms"] / base,
                        marker,
                        color=color,
                        markerfacecolor=face,
                        markersize=6,
                        alpha=0.8,
                    )
        panel.set(title=f"{name}, {machine['card, GB']} GB each", xscale="log", yscale="log", ylim=(0.85, 60))
        for axis in (panel.xaxis, panel.yaxis):
            axis.set_major_formatter("{x:g}")
        panel.axvline(machine["card, GB"], linestyle=":", color="gray")
    for panel in axes[-1]:
        panel.set_xlabel("weights on each GPU, GB")
    for row in axes:
        row[0].set_ylabel("time of one forward / baseline")
    for name, color in SHOWN.values():
        axes[0, 0].plot([], [], "o", color=color, label=name)
    for marker, (title, _, _) in zip(MARKERS, MODELS, strict=True):
        axes[0, 0].plot([], [], marker, color="black", markerfacecolor="none", label=title)
    axes[0, 0].plot([], [], linestyle=":", color="gray", label="memory of the GPU (hollow: too large)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6, fontsize=9)
    save_figure(figure, path)


def page(found: Mapping[str, Any]) -> str:
    """Return the page with the given figures."""
    called = {title: Workload.from_json(workload) for title, workload in found["workloads"].items()}
    body = "\n\n".join(
        f"## {name}, {machine['card, GB']} GB each\n\n{table(machine, called)}\n\n{unmet(machine)}".rstrip()
        for name, machine in found["machines"].items()
    )
    without = ", ".join(name for name, machine in found["machines"].items() if machine["why no peers"])
    sizes = "\n".join(f"* {title}: {workload}." for title, workload in called.items())
    return f"""# Several GPUs on one host, method by method

These figures are predicted by the functions of `chunkflow simulate`; **no figure is measured**. Each cell gives the weights
on each GPU in GB, without activations, and the time of one forward in ms. All GPUs of the host run Ulysses sequence
parallelism. A denoising step runs as many forwards as the second column shows. For Wan2.2 A14B, the figures are for one of
its two experts, because one expert runs in a step. `make several-gpus` writes this page and
[all figures](several_gpus.json), which also cover `layerwise`, group offload and the smallest possible plans.

* In the [baseline](../glossary.md#baseline), all weights are [resident](../glossary.md#resident) on every GPU.
* *ChunkFlow, host* streams weights from host memory, with the GPU memory of DLO.
* *ChunkFlow, [peers](../glossary.md#peers)* keeps
  [weights on the GPUs of other ranks](../guide.md#weights-on-the-devices-of-other-ranks) (`--peers`), with the GPU memory of
  HSDP.
* *ChunkFlow, mix* is the [smallest plan](../glossary.md#plan) whose forward takes at most 1.02 times the baseline. Its
  weights are on the GPU, on peers, and in host memory (`--peers auto`).
* DLO and HSDP are the [policies](../planning.md#simulation) `distributed-layerwise` and `fsdp`. They model
  [how other systems use several GPUs](../planning.md#how-other-systems-use-several-gpus), and are compared with
  [published step times](#published). The copies around all-gathers and the work of the host are not simulated; with them,
  their steps would be longer.

**Bold** marks the method that reaches the baseline (at most 1.02 times its forward) with the fewest bytes, if these are less
than {GAIN:g} of all weights. "!" marks weights that exceed the memory of the GPU in its data sheet.
[Regions](../glossary.md#region) are cut only at collectives, and [chunks](../glossary.md#chunk) have
{CHUNK_BYTES >> 20} MiB. The memory bandwidth that the ranks of a host share (`host_bandwidth` in each profile) is an
assumption, except for the host of the H100. The rates of pulls from peers are assumptions, too. There are no peers where the
profile has no `peer_bandwidth`: {without}.

Each model is planned as its pipeline in diffusers calls it:

{sizes}

![time of one forward and weights on each GPU, by method](several_gpus.png)

{body}

## Published

Cosmos3-Super (124 GB) on four B300 GPUs, from vLLM's blog of 2026-07-30: complete clips of 29 frames at 480p, in 35 steps.
The predictions assume equal blocks, the profile `b200`, and the amount of compute with which `fsdp` takes the published
time.

{published_table(found["published of Cosmos3-Super"])}
"""


def published_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of the short clip, for which figures of all methods are published."""
    short = [row for row in rows if row["clip"] == rows[0]["clip"]]
    shown = [(row["way"], f"{row['published, s']:.2f} s", f"{row['predicted, s']:.2f} s") for row in short]
    return tabulate(shown, headers=("method", "published, per step", "predicted"), tablefmt="github")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cache", type=Path, help="keep finished results in this file, and continue from it")
    parser.add_argument(
        "--page-only", action="store_true", help="make the page and the picture from the JSON next to it"
    )
    arguments = parser.parse_args()
    kept = arguments.out.with_suffix(".json")
    if not arguments.page_only:
        quiet_diffusers()
        kept.write_text(as_text(figures(measure(arguments.cache))))
    found = saved(kept, "make several-gpus")
    draw(found, arguments.out.with_suffix(".png"))
    arguments.out.write_text(page(found))


if __name__ == "__main__":
    with errors_in_a_sentence():
        main()
