"""Whole pipelines on GPUs of 12 to 80 GB, planned within the memory of each: the figures of the README.

    python docs/benchmarks/readme_gpus.py                 # plans all rows into readme_gpus.json: an hour of one core
    python docs/benchmarks/readme_gpus.py --models flux.1-dev

A row is what ``chunkflow pipeline MODEL --memory SIZE --hardware PROFILE`` predicts for the denoising steps, on the coarser
regions of methods.py, which take less time to plan.  Traces are kept in the user's cache folder.  Needs no network and no
GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from methods import (
    BENCHMARKS,
    CHUNK_BYTES,
    CHUNKFLOW,
    GROUP,
    GROUP_BYTES,
    MODELS,
    PLAIN,
    Way,
    transformer_traced,
)
from torch import nn
from tqdm import tqdm

from chunkflow_compile.catalog.eager_cost import EagerCost, eager_cost
from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.catalog.published import Encoder, published
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.cli.pipeline import kept_cost
from chunkflow_compile.hardware.headroom import budget_for, usable
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.cutting import make_cut
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.goal import Goal
from chunkflow_compile.passes.graph.hoist import Halves, split
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.hoisting import plan_halves
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES
from chunkflow_compile.passes.placement.place import least_memory, place
from chunkflow_compile.passes.placement.splitting import best_split, splits
from chunkflow_compile.passes.plan import Plan
from chunkflow_compile.passes.planning import Settings, make_plan
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.simulate.group_offload import play_group_offload
from chunkflow_compile.weights.drive import for_the_drive, with_drive

PLANNED = BENCHMARKS / "readme_gpus.json"
GIB = 1 << 30

MODEL = "model offload"
# ChunkFlow in the GPU memory that group offload takes; with packed weights; and with the weights that exceed host_memory on
# an SSD that reads so many bytes/s, as an NVMe SSD for PCIe 3.0 does.
IN_ITS_MEMORY, PACKED, ON_SSD = "ChunkFlow in the memory of group offload", "pack=True", "host_memory, SSD"
# What no latent reaches is computed once for many steps; and both.
HOISTED, BOTH = "hoist=True", "hoist=True, pack=True"
# A combination is shown if it takes at most so much of the step without it.
WORTH = 0.99
SSD = 3.5e9
# For weights, on a machine with 32 GB of RAM: the rest is for the operating system, Python and the page cache.
HOST_OF_32_GB = 22 * GIB


@dataclass(frozen=True)
class Gpu:
    """A GPU: its memory by its data sheet in GB, its name, its profile, and the budget in GiB that is planned for.

    ``budget``: the argument ``memory`` of ``compile``; the remaining memory is for the CUDA context, libraries and a desktop.
    """

    memory: int
    name: str
    profile: str
    budget: int


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu(12, "RTX 3060", "rtx-3060-pcie", 10),
        Gpu(16, "RTX 4060 Ti", "rtx-4060-ti-pcie", 14),
        Gpu(16, "RTX 4080", "rtx-4080-pcie", 14),
        Gpu(24, "RTX 4090", "rtx-4090-pcie", 22),
        Gpu(32, "RTX 5090", "rtx-5090-pcie", 30),
        Gpu(80, "H100 SXM", "h100-nvlink", 76),
    )
}
# The GPU of the examples in sentences, planned with less host memory too.
EXAMPLE = "RTX 4060 Ti"
# Budgets of the curves, in GiB, as far as they are below that of the GPU; a curve begins at the least budget.
CURVE = (4, 8, 12, 16, 20, 30, 40, 60)


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline on ``gpu``, a key of :data:`GPUS`.

    ``least``: the smallest budget in which all components run, in bytes.  ``ways``: by name; the bytes are the budget of
    ChunkFlow, which is there only if it is at least that, or else the peak of all components.  ``curve``: bytes of a budget,
    and seconds of a forward within it.  ``host``: bytes of host memory for the weights of all components, and with
    ``pack=True``.
    """

    workload: Workload
    gpu: str
    least: int
    ways: Mapping[str, Way]
    curve: Sequence[tuple[int, float]]
    host: int
    host_packed: int
    how: str = "planned"

    @property
    def on(self) -> Gpu:
        return GPUS[self.gpu]

    def fits(self, way: str) -> bool:
        """Whether the GPU has the memory of a way, less what is left of it for others."""
        return way in self.ways and self.ways[way].nbytes <= self.on.budget * GIB

    @property
    def fastest(self) -> str | None:
        """The combination of options with the shortest step, None if it is hardly shorter than without any."""
        able = [way for way in (HOISTED, PACKED, BOTH) if way in self.ways]
        best = min(able, key=lambda way: self.ways[way].forward_s, default=None)
        worth = best is not None and self.ways[best].forward_s <= WORTH * self.ways[CHUNKFLOW].forward_s
        return best if worth else None

    def step_s(self, way: str) -> float:
        """Seconds of a denoising step."""
        return self.workload.forwards * self.ways[way].forward_s


def planned(path: Path = PLANNED) -> list[Row]:
    """The rows that are planned.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it contains the planned rows. Write it again with --plan.")
    return [_row(body) for body in json.loads(path.read_text())]


def _row(body: Mapping[str, Any]) -> Row:
    ways = {name: Way(**way) for name, way in body["ways"].items()}
    curve = tuple((nbytes, forward_s) for nbytes, forward_s in body["curve"])
    return Row(**{**body, "workload": Workload.from_json(body["workload"]), "ways": ways, "curve": curve})


def cases() -> Iterator[tuple[str, str]]:
    """The models and GPUs, in the order of the table: the rows of a GPU together."""
    return ((model, gpu) for gpu in GPUS for model in MODELS)


@dataclass(frozen=True, kw_only=True)
class Part:
    """A component other than a transformer, in bytes.  ``small``: its weights that do not stream.  ``grouped``: the weights
    that group offload keeps on the GPU while it runs."""

    weights: int
    small: int
    activations: int
    grouped: int


# Makes the problem that is planned from a cut.
Form = Callable[[Cut], Problem]


def as_it_is(cut: Cut) -> Problem:
    """The problem of a cut with its weights as they are."""
    return cut.problem


def with_all_packed(cut: Cut) -> Problem:
    """The problem of a cut with packed weights."""
    return packed(cut, packable(cut)).problem


def _fastest(cuts: Sequence[Cut], plan: Callable[[Cut], Plan]) -> float:
    """Seconds of a forward of the best of these cuts, each with more slices than those before."""
    times = dict[int, float]()

    def planned(cut: Cut) -> Plan:
        made = plan(cut)
        assert made.predicted is not None
        times[id(cut)] = made.predicted.step_s
        return made

    chosen = best_split(cuts, planned)
    if id(chosen) not in times:
        planned(chosen)  # raises: the budget is too little for all of them
    return times[id(chosen)]


@dataclass(frozen=True)
class Planned:
    """A pipeline with its transformer traced."""

    model: str

    @cached_property
    def others(self) -> list[Part]:
        """The encoders and the VAE."""
        pipeline, found = published(self.model), list[Part]()
        for encoder in pipeline.encoders:
            cost = kept_cost(asdict(encoder), partial(eager_cost, encoder.model_and_inputs, torch.bfloat16))
            found.append(_part(cost, _grouped(encoder, cost.weights)))
        decode = partial(pipeline.vae_and_latents, pipeline.transformer.sizes)
        key = {"decoder of": asdict(pipeline), "sizes": asdict(pipeline.transformer.sizes)}
        cost = kept_cost(key, partial(eager_cost, decode, torch.bfloat16, "decode"))
        return [*found, _part(cost, cost.weights)]

    @cached_property
    def traced(self) -> Traced:
        known = preset(self.model)
        return transformer_traced(known, known.sizes, 1)

    @cached_property
    def cut(self) -> Cut:
        return make_cut(self.traced, GROUP_BYTES)

    @cached_property
    def cuts(self) -> list[Cut]:
        """The cut with whole blocks, and with more and more slices."""
        return [self.cut, *splits(self.cut)]

    @property
    def activations(self) -> int:
        """Bytes of activations of the transformer with whole blocks."""
        return self.cut.problem.live_bytes

    @property
    def kept(self) -> int:
        """Bytes of the weights of a transformer that stay on the GPU while other components run."""
        return sum(w.nbytes for w in self.cut.problem.weights if w.nbytes < DEFAULT_MIN_BYTES)

    @property
    def experts(self) -> int:
        return published(self.model).experts

    @cached_property
    def small(self) -> int:
        """Bytes of the weights of other components that stay on the GPU while the transformer runs."""
        return sum(part.small for part in self.others) + (self.experts - 1) * self.kept

    @cached_property
    def least(self) -> int:
        """The smallest budget in which the transformer and the decoder run, in bytes; it depends on no rate of the GPU."""
        hardware, problems = load_profile("rtx-4090-pcie"), [cut.problem for cut in self.cuts]
        needed = min(least_memory(problem, hardware, CHUNK_BYTES) + problem.live_bytes for problem in problems)
        vae = self.others[-1]
        return budget_for(max(needed + self.small, vae.weights + vae.activations + self.experts * self.kept))

    @cached_property
    def host(self) -> int:
        """Bytes of host memory for the weights of all components."""
        return self.experts * self.cut.problem.total_bytes + sum(part.weights for part in self.others)

    @cached_property
    def halves(self) -> Halves | None:
        """The transformer in two, None if there is nothing to hoist."""
        return split(self.traced)

    def hoisted_s(self, hardware: Hardware, budget: int, *, pack: bool = False) -> float:
        """Seconds of a forward in a budget with what is hoisted, with its share of computing the rows."""
        assert self.halves is not None
        settings = Settings(hardware=hardware, goal=self.goal(budget), chunk_bytes=CHUNK_BYTES)
        hoisting = plan_halves(self.halves, settings)
        cut = make_cut(self.halves.main, GROUP_BYTES)
        form = with_all_packed if pack else as_it_is
        step_s = _fastest([cut, *splits(cut)], lambda cut: make_plan(form(cut), hoisting.main))
        return step_s + hoisting.figures.seconds_per_call

    @cached_property
    def host_packed(self) -> int:
        """The same with packed weights: those of the encoders shrink as much as those of the transformer."""
        share = with_all_packed(self.cut).total_bytes / self.cut.problem.total_bytes
        return int(share * self.host)

    def goal(self, budget: int) -> Goal:
        """That of the transformer within a budget for the pipeline."""
        return Goal(memory=usable(budget) - self.small, activations=True)

    def forward_s(self, hardware: Hardware, budget: int | None, form: Form = as_it_is) -> float:
        """Seconds of a forward in a budget, in as few slices as it needs, or with all weights on the GPU.  ``form``: of the
        transformer, by its cut."""
        goal = Goal(policy="resident") if budget is None else self.goal(budget)
        return _fastest(
            self.cuts[:1] if budget is None else self.cuts,
            lambda cut: place(form(cut), hardware, goal, chunk_bytes=CHUNK_BYTES),
        )

    def group_offload(self, hardware: Hardware) -> Way:
        """diffusers' group offload for all components; the VAE moves as a whole."""
        played = play_group_offload(self.cut.problem, hardware)
        peaks = [part.grouped + part.activations for part in self.others]
        return Way(forward_s=played.timeline.step_s, nbytes=max(played.device_bytes + self.activations, *peaks))


def _part(cost: EagerCost, grouped: int) -> Part:
    return Part(weights=cost.weights, small=cost.small, activations=cost.activations, grouped=grouped)


def _grouped(encoder: Encoder, weights: int) -> int:
    """Bytes of an encoder that group offload keeps on the GPU: two blocks of a direct ModuleList, and all other weights."""
    with torch.device("meta"):
        model, _ = encoder.model_and_inputs()
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    sizes = [2 * sum(p.numel() for p in block.parameters()) for blocks in lists for block in blocks]
    return weights - sum(sizes) + max((a + b for a, b in pairwise([*sizes, 0])), default=0)


def plan(planned: Planned, gpu: str) -> Row:
    """A pipeline on ``gpu``, a key of :data:`GPUS`."""
    budget, hardware = GPUS[gpu].budget * GIB, load_profile(GPUS[gpu].profile)
    weights, others = planned.cut.problem.total_bytes, planned.others
    all_resident, group = planned.forward_s(hardware, None), planned.group_offload(hardware)
    single = [weights + planned.activations, *(part.weights + part.activations for part in others)]
    total = planned.experts * weights + sum(part.weights for part in others)
    total += max(planned.activations, *(part.activations for part in others))
    ways = {
        PLAIN: Way(forward_s=all_resident, nbytes=total),
        MODEL: Way(forward_s=all_resident, nbytes=max(single)),
        GROUP: group,
    }
    least, curve = planned.least, dict[int, float]()
    if least <= budget:
        sizes = [size * GIB for size in CURVE]
        same = max(least, group.nbytes)  # a budget keeps some percent free, so the least one may be a little larger
        for nbytes in sorted({least, budget, *(n for n in (same, *sizes) if least <= n < budget)}):
            fastest = min(curve.values(), default=2 * all_resident)  # no budget is faster than all weights on the GPU
            curve[nbytes] = fastest if fastest <= 1.0001 * all_resident else planned.forward_s(hardware, nbytes)
        ways[CHUNKFLOW] = Way(forward_s=curve[budget], nbytes=budget)
        if same in curve:
            ways[IN_ITS_MEMORY] = Way(forward_s=curve[same], nbytes=same)
        ways |= _with_options(planned, hardware, budget)
        if gpu == EXAMPLE:
            ways |= _in_less_host_memory(planned, hardware, budget)
    return Row(
        workload=preset(planned.model).workload(),
        gpu=gpu,
        least=least,
        ways=ways,
        curve=[*curve.items()],
        host=planned.host,
        host_packed=planned.host_packed,
    )


def _with_options(planned: Planned, hardware: Hardware, budget: int) -> dict[str, Way]:
    """The same budget with packed weights, with what is hoisted, and with both."""
    found = {PACKED: planned.forward_s(hardware, budget, with_all_packed)}
    if planned.halves is not None:
        found[HOISTED] = planned.hoisted_s(hardware, budget)
        found[BOTH] = planned.hoisted_s(hardware, budget, pack=True)
    return {name: Way(forward_s=forward_s, nbytes=budget) for name, forward_s in found.items()}


def _in_less_host_memory(planned: Planned, hardware: Hardware, budget: int) -> dict[str, Way]:
    """The same budget with ``host_memory`` where the weights do not fit 32 GB of RAM."""
    cut, ways = planned.cut, dict[str, Way]()
    part = HOST_OF_32_GB / planned.host
    if part < 1:  # compile divides it over the components by their bytes
        names = for_the_drive(planned.traced.large, int(part * cut.problem.total_bytes))
        on_ssd = replace(hardware, drive_bandwidth=SSD)
        seconds = planned.forward_s(on_ssd, budget, lambda cut: with_drive(cut.problem, names))
        ways[ON_SSD] = Way(forward_s=seconds, nbytes=budget)
    return ways


def plan_again(models: Sequence[str], path: Path = PLANNED) -> None:
    """Plan the models, and keep the rows of others; the file is written after each row."""
    quiet_diffusers()
    for model in models:
        traced = Planned(model)
        for gpu in tqdm(GPUS, desc=model):
            found = {(row.workload.model, row.gpu): row for row in (planned(path) if path.exists() else [])}
            found[model, gpu] = plan(traced, gpu)
            rows = [_as_json(found[case]) for case in cases() if case in found]  # a case that is gone leaves no row
            path.write_text(json.dumps(rows, indent=1) + "\n")


def _as_json(row: Row) -> dict[str, Any]:
    body = asdict(row)
    for way in body["ways"].values():
        way["forward_s"] = round(way["forward_s"], 6)
    return body | {"curve": [[nbytes, round(forward_s, 6)] for nbytes, forward_s in row.curve]}


def main(given: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="those to plan again; the rows of others are kept")
    plan_again(parser.parse_args(given).models.split(","))
    return 0


if __name__ == "__main__":
    sys.exit(main())
