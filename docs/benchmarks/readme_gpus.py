"""Plan whole pipelines for GPUs of 12 to 80 GB, with a budget that fits each GPU.  The README shows these figures.

    python docs/benchmarks/readme_gpus.py                 # plans all rows into readme_gpus.json: an hour of one core
    python docs/benchmarks/readme_gpus.py --models flux.1-dev

A row contains the predictions of ``chunkflow pipeline MODEL --memory SIZE --hardware PROFILE`` for the denoising steps.
It uses the coarser regions of methods.py, for which planning takes less time.  Traces are kept in the user's cache
folder.  The script needs no network and no GPU.
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
# Variants of ChunkFlow: with the GPU memory that group offload takes, with packed weights, and with the weights that
# exceed host_memory on an SSD.
IN_ITS_MEMORY, PACKED, ON_SSD = "ChunkFlow in the memory of group offload", "pack=True", "host_memory, SSD"
# Variants of ChunkFlow: with hoisted products, and with hoisted products and packed weights.
HOISTED, BOTH = "hoist=True", "hoist=True, pack=True"
# A combination of options is shown only if its step takes at most this share of the step without options.
WORTH = 0.99
# The read rate of the SSD in bytes/s, typical of an NVMe SSD for PCIe 3.0.
SSD = 3.5e9
# The host memory for weights on a machine with 32 GB of RAM, in bytes.  The operating system, Python and the page cache
# use the rest.
HOST_OF_32_GB = 22 * GIB


@dataclass(frozen=True)
class Gpu:
    """A GPU.  ``memory``: its memory in GB according to its data sheet.

    ``budget``: the budget that is given to ``compile``, in GiB.  The CUDA context, libraries and a desktop use the
    remaining memory.
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
# The GPU in the README's examples.  For this GPU, the models are also planned with less host memory.
EXAMPLE = "RTX 4060 Ti"
# The budgets for which points of the curves are planned, in GiB.  A curve also contains the minimum budget and the budget
# of the GPU, and leaves out all budgets outside this range.
CURVE = (4, 8, 12, 16, 20, 30, 40, 60)


@dataclass(frozen=True, kw_only=True)
class Row:
    """The planned figures of a pipeline on a GPU.  ``gpu``: a key of :data:`GPUS`.

    ``least``: the minimum budget with which all components run, in bytes.  ``ways``: the figures by method.  For a
    variant of ChunkFlow, the bytes are its budget, and there are no figures if the budget is below the minimum.  For
    other methods, the bytes are the peak over all components.  ``curve``: pairs of a budget in bytes and the seconds of a
    forward with this budget.  ``host``, ``host_packed``: the bytes of host memory for the weights of all components,
    uncompressed and with ``pack=True``.
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
        """Whether there are figures for a method and its bytes are at most the budget of the GPU."""
        return way in self.ways and self.ways[way].nbytes <= self.on.budget * GIB

    @property
    def fastest(self) -> str | None:
        """The combination of options with the shortest step, or None if its step is hardly shorter than without
        options."""
        able = [way for way in (HOISTED, PACKED, BOTH) if way in self.ways]
        best = min(able, key=lambda way: self.ways[way].forward_s, default=None)
        worth = best is not None and self.ways[best].forward_s <= WORTH * self.ways[CHUNKFLOW].forward_s
        return best if worth else None

    def step_s(self, way: str) -> float:
        """Return the seconds of a denoising step with a method."""
        return self.workload.forwards * self.ways[way].forward_s


def planned(path: Path = PLANNED) -> list[Row]:
    """Return the planned rows.  Raises ChunkflowError if their file is missing."""
    if not path.exists():
        raise ChunkflowError(f"{path} is missing: it contains the planned rows. Write it again with --plan.")
    return [_row(body) for body in json.loads(path.read_text())]


def _row(body: Mapping[str, Any]) -> Row:
    ways = {name: Way(**way) for name, way in body["ways"].items()}
    curve = tuple((nbytes, forward_s) for nbytes, forward_s in body["curve"])
    return Row(**{**body, "workload": Workload.from_json(body["workload"]), "ways": ways, "curve": curve})


def cases() -> Iterator[tuple[str, str]]:
    """Return the pairs of a model and a GPU in the order of the table, which is sorted by GPU."""
    return ((model, gpu) for gpu in GPUS for model in MODELS)


@dataclass(frozen=True, kw_only=True)
class Part:
    """The sizes of a text encoder or VAE in bytes.  ``weights``: all weights.  ``small``: the weights that are too small
    to stream.  ``grouped``: the maximum bytes of weights on the GPU while it runs with group offload."""

    weights: int
    small: int
    activations: int
    grouped: int


# A function from a cut to the problem to plan.
Form = Callable[[Cut], Problem]


def as_it_is(cut: Cut) -> Problem:
    """Return the problem of a cut with uncompressed weights."""
    return cut.problem


def with_all_packed(cut: Cut) -> Problem:
    """Return the problem of a cut with packed weights."""
    return packed(cut, packable(cut)).problem


def _minimum(cut: Cut) -> int:
    """Return the minimum bytes of weights and activations with which a cut runs.  They are the same for all GPUs."""
    return least_memory(cut.problem, load_profile("rtx-4090-pcie"), CHUNK_BYTES) + cut.problem.live_bytes


def _fastest(cuts: Sequence[Cut], plan: Callable[[Cut], Plan]) -> float:
    """Return the seconds of a forward with the best of several cuts.  ``cuts``: cuts of a model, in ascending order of
    the number of slices."""
    times = dict[int, float]()

    def planned(cut: Cut) -> Plan:
        made = plan(cut)
        assert made.predicted is not None
        times[id(cut)] = made.predicted.step_s
        return made

    chosen = best_split(cuts, planned, _minimum)
    if id(chosen) not in times:
        planned(chosen)  # raises an error, because the budget is too small for all cuts
    return times[id(chosen)]


@dataclass(frozen=True)
class Planned:
    """A pipeline to plan.  Its transformer is traced once for all GPUs."""

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
        """The cuts with whole blocks and with increasing numbers of slices."""
        return [self.cut, *splits(self.cut)]

    @property
    def activations(self) -> int:
        """The bytes of activations of the transformer with whole blocks."""
        return self.cut.problem.live_bytes

    @property
    def kept(self) -> int:
        """The bytes of a transformer's weights that stay on the GPU while other components run."""
        return sum(w.nbytes for w in self.cut.problem.weights if w.nbytes < DEFAULT_MIN_BYTES)

    @property
    def experts(self) -> int:
        return published(self.model).experts

    @cached_property
    def small(self) -> int:
        """The bytes of other components' weights that stay on the GPU while the transformer runs."""
        return sum(part.small for part in self.others) + (self.experts - 1) * self.kept

    @cached_property
    def least(self) -> int:
        """The minimum budget in bytes with which the transformer and the decoder run.  It is the same for all GPUs."""
        needed = min(map(_minimum, self.cuts))
        vae = self.others[-1]
        return budget_for(max(needed + self.small, vae.weights + vae.activations + self.experts * self.kept))

    @cached_property
    def host(self) -> int:
        """The bytes of host memory for the weights of all components."""
        return self.experts * self.cut.problem.total_bytes + sum(part.weights for part in self.others)

    @cached_property
    def halves(self) -> Halves | None:
        """The halves of the transformer, or None if nothing can be hoisted."""
        return split(self.traced)

    def hoisted_s(self, hardware: Hardware, budget: int, *, pack: bool = False) -> float:
        """Return the seconds of a forward with hoisted products.  They include the share of one forward in the time for
        computing the rows."""
        assert self.halves is not None
        settings = Settings(hardware=hardware, goal=self.goal(budget), chunk_bytes=CHUNK_BYTES)
        hoisting = plan_halves(self.halves, settings)
        cut = make_cut(self.halves.main, GROUP_BYTES)
        form = with_all_packed if pack else as_it_is
        step_s = _fastest([cut, *splits(cut)], lambda cut: make_plan(form(cut), hoisting.main))
        return step_s + hoisting.figures.seconds_per_call

    @cached_property
    def host_packed(self) -> int:
        """The bytes of host memory for the packed weights of all components.  The weights of the other components are
        assumed to shrink as much as the transformer's."""
        share = with_all_packed(self.cut).total_bytes / self.cut.problem.total_bytes
        return int(share * self.host)

    def goal(self, budget: int) -> Goal:
        """Return the goal for planning the transformer.  ``budget``: the budget of the whole pipeline in bytes."""
        return Goal(memory=usable(budget) - self.small, activations=True)

    def forward_s(self, hardware: Hardware, budget: int | None, form: Form = as_it_is) -> float:
        """Return the seconds of a forward with the best number of slices.  ``budget``: the budget of the pipeline in
        bytes, or None to keep all weights on the GPU.  ``form``: the function that returns the problem to plan."""
        goal = Goal(policy="resident") if budget is None else self.goal(budget)
        return _fastest(
            self.cuts[:1] if budget is None else self.cuts,
            lambda cut: place(form(cut), hardware, goal, chunk_bytes=CHUNK_BYTES),
        )

    def group_offload(self, hardware: Hardware) -> Way:
        """Return the figures of diffusers' group offload for all components.  The VAE is moved as a whole."""
        played = play_group_offload(self.cut.problem, hardware)
        peaks = [part.grouped + part.activations for part in self.others]
        return Way(forward_s=played.timeline.step_s, nbytes=max(played.device_bytes + self.activations, *peaks))


def _part(cost: EagerCost, grouped: int) -> Part:
    return Part(weights=cost.weights, small=cost.small, activations=cost.activations, grouped=grouped)


def _grouped(encoder: Encoder, weights: int) -> int:
    """Return the maximum bytes of an encoder's weights on the GPU with group offload: two blocks of each ModuleList that
    is a direct child, and all other weights."""
    with torch.device("meta"):
        model, _ = encoder.model_and_inputs()
    lists = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    sizes = [2 * sum(p.numel() for p in block.parameters()) for blocks in lists for block in blocks]
    return weights - sum(sizes) + max((a + b for a, b in pairwise([*sizes, 0])), default=0)


def plan(planned: Planned, gpu: str) -> Row:
    """Plan a pipeline with all methods.  ``gpu``: a key of :data:`GPUS`."""
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
        same = max(
            least, group.nbytes
        )  # the minimum budget may be a little larger, because some percent of a budget are not used
        for nbytes in sorted({least, budget, *(n for n in (same, *sizes) if least <= n < budget)}):
            fastest = min(
                curve.values(), default=2 * all_resident
            )  # a forward is never faster than with all weights on the GPU, so do not plan beyond that
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
    """Return the figures with packed weights, with hoisted products, and with both, for the same budget."""
    found = {PACKED: planned.forward_s(hardware, budget, with_all_packed)}
    if planned.halves is not None:
        found[HOISTED] = planned.hoisted_s(hardware, budget)
        found[BOTH] = planned.hoisted_s(hardware, budget, pack=True)
    return {name: Way(forward_s=forward_s, nbytes=budget) for name, forward_s in found.items()}


def _in_less_host_memory(planned: Planned, hardware: Hardware, budget: int) -> dict[str, Way]:
    """Return the figures with ``host_memory`` for the same budget; empty if all weights fit in 32 GB of RAM."""
    cut, ways = planned.cut, dict[str, Way]()
    part = HOST_OF_32_GB / planned.host
    if part < 1:  # compile divides host_memory among the components in proportion to their bytes
        names = for_the_drive(planned.traced.large, int(part * cut.problem.total_bytes))
        on_ssd = replace(hardware, drive_bandwidth=SSD)
        seconds = planned.forward_s(on_ssd, budget, lambda cut: with_drive(cut.problem, names))
        ways[ON_SSD] = Way(forward_s=seconds, nbytes=budget)
    return ways


def plan_again(models: Sequence[str], path: Path = PLANNED) -> None:
    """Plan the given models, and keep the rows of all others.  The file is written after each row."""
    quiet_diffusers()
    for model in models:
        traced = Planned(model)
        for gpu in tqdm(GPUS, desc=model):
            found = {(row.workload.model, row.gpu): row for row in (planned(path) if path.exists() else [])}
            found[model, gpu] = plan(traced, gpu)
            rows = [_as_json(found[case]) for case in cases() if case in found]  # drops rows of former cases
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
