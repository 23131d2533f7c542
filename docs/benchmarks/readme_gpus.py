"""Whole pipelines on GPUs of 12 to 80 GB, planned within the memory of each: the figures of the README.

    python docs/benchmarks/readme_gpus.py                 # plans all rows into readme_gpus.json: an hour of one core
    python docs/benchmarks/readme_gpus.py --models flux.1-dev

A row is what ``chunkflow pipeline MODEL --memory SIZE --hardware PROFILE`` predicts for the denoising steps.  Traces are
kept in the user's cache folder.  Needs no network and no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chunkflow_compile.catalog.presets import Workload, preset
from chunkflow_compile.catalog.published import published
from chunkflow_compile.catalog.quiet import quiet_diffusers
from chunkflow_compile.cli.pipeline import _components
from chunkflow_compile.cli.target import preset_call, trace_entry
from chunkflow_compile.hardware.headroom import usable
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.pack import packable, packed
from chunkflow_compile.passes.graph.regions import Cut
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_CHUNK_BYTES, DEFAULT_MIN_BYTES
from chunkflow_compile.passes.pipeline import make_cut
from chunkflow_compile.passes.placement.place import place
from chunkflow_compile.passes.problem import Problem
from chunkflow_compile.simulate.generation import Component, least_budget
from chunkflow_compile.simulate.group_offload import play_group_offload
from chunkflow_compile.weights.drive import for_the_drive, with_drive
from chunkflow_compile.weights.progress import Progress

BENCHMARKS = Path(__file__).parent
PLANNED = BENCHMARKS / "readme_gpus.json"
GIB = 1 << 30

MODELS = {
    "flux.1-dev": "FLUX.1-dev",
    "qwen-image": "Qwen-Image",
    "wan2.2-ti2v-5b": "Wan2.2 5B",
    "wan2.2-t2v-a14b": "Wan2.2 A14B",
    "hunyuanvideo": "HunyuanVideo",
}
COMPILED, MODEL, GROUP, CHUNKFLOW = "torch.compile", "model offload", "group offload", "ChunkFlow"
# ChunkFlow in the GPU memory that group offload takes; with weights packed; and with weights on a drive of so many bytes/s.
IN_ITS_MEMORY, PACKED = "ChunkFlow in the memory of group offload", "pack=True"
DRIVES = {"host_memory, SSD of 3.5 GB/s": 3.5e9, "host_memory, SSD of 7 GB/s": 7e9}
# For weights, on a machine with 32 GB of RAM: the rest is for the operating system, Python and the page cache.
HOST_OF_32_GB = 22 * GIB


@dataclass(frozen=True)
class Gpus:
    """GPUs of one host: the memory of each by its data sheet, their name, their profile, how many, and the budget of each.

    ``memory``: in GB, as data sheets have it.  ``budget``: in GiB, the argument ``memory`` of ``compile``; what is left is
    for the CUDA context, libraries and a desktop.
    """

    memory: int
    card: str
    profile: str
    budget: int
    ranks: int = 1

    @property
    def name(self) -> str:
        return self.card if self.ranks == 1 else f"{self.ranks} x {self.card}"


GPUS = {
    gpus.name: gpus
    for gpus in (
        Gpus(12, "RTX 3060", "rtx-3060-pcie", 10),
        Gpus(16, "RTX 4060 Ti", "rtx-4060-ti-pcie", 14),
        Gpus(16, "RTX 4080", "rtx-4080-pcie", 14),
        Gpus(24, "RTX 4090", "rtx-4090-pcie", 22),
        Gpus(32, "RTX 5090", "rtx-5090-pcie", 30),
        Gpus(80, "H100 SXM", "h100-nvlink", 76),
        Gpus(24, "RTX 4090", "rtx-4090-pcie", 22, ranks=2),
        Gpus(24, "RTX 4090", "rtx-4090-pcie", 22, ranks=4),
    )
}
# Budgets of the curves, in GiB, as far as they are below that of the GPU; a curve begins at the least budget.
CURVE = (2, 3, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 26, 30, 36, 42, 50)


@dataclass(frozen=True, kw_only=True)
class Way:
    """Seconds of one forward, and bytes of GPU memory: the budget of ChunkFlow, or else the peak of all components."""

    forward_s: float
    nbytes: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """A pipeline on ``gpus``, a key of :data:`GPUS`.

    ``least``: the smallest budget in which all components run, in bytes.  ``ways``: by name; ChunkFlow only if its budget is
    at least that.  ``curve``: bytes of a budget, and seconds of a forward within it.  ``host``: bytes of host memory for the
    weights of all components, and with ``pack=True``.
    """

    workload: Workload
    gpus: str
    least: int
    ways: Mapping[str, Way]
    curve: Sequence[tuple[int, float]]
    host: int
    host_packed: int
    how: str = "planned"

    @property
    def on(self) -> Gpus:
        return GPUS[self.gpus]

    def fits(self, way: str) -> bool:
        """Whether the GPU has the memory of a way, less what is left of it for others."""
        return way in self.ways and self.ways[way].nbytes <= self.on.budget * GIB

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
    return ((model, gpus) for gpus in GPUS for model in MODELS)


@dataclass(frozen=True)
class Planned:
    """A pipeline with its transformer traced for ``ranks`` ranks."""

    model: str
    ranks: int

    @cached_property
    def traced(self) -> Traced:
        known = preset(self.model)
        key, call = preset_call(known, self.ranks, known.sizes, DEFAULT_MIN_BYTES, None, 1)
        return replace(trace_entry(key).get(call), fused=True)

    @cached_property
    def components(self) -> list[Component]:
        """Those of a rank: activations of the transformer are of its part of the tokens."""
        pipeline, hardware = published(self.model), load_profile("rtx-4090-pcie")
        sizes, progress = pipeline.transformer.sizes, Progress(len(pipeline.encoders) + 3)
        found = _components(pipeline, sizes, pipeline.steps, hardware, True, progress)
        cut = make_cut(self.traced)
        return [
            replace(c, cut=cut, activations=c.activations // self.ranks) if c.name.startswith("transformer") else c
            for c in found
        ]

    @property
    def transformer(self) -> Component:
        return next(c for c in self.components if c.name == "transformer")

    @property
    def cut(self) -> Cut:
        assert self.transformer.cut is not None
        return self.transformer.cut

    def host(self, pack: bool = False) -> int:
        """Bytes of host memory for the weights of all components."""
        cuts = [(c.all_packed if pack else c.cut, c.weights) for c in self.components]
        return sum(weights if cut is None else cut.problem.total_bytes for cut, weights in cuts)

    def room(self, budget: int) -> int:
        """Bytes of a budget for the weights of the transformer."""
        others = sum(c.small for c in self.components if c is not self.transformer)
        return usable(budget) - self.transformer.activations - others

    def forward_s(self, hardware: Hardware, budget: int | None, problem: Problem | None = None) -> float:
        """Seconds of a forward in a budget, or with all weights on the GPU."""
        goal: dict[str, Any] = {"policy": "resident"} if budget is None else {"memory": self.room(budget)}
        plan = place(problem or self.cut.problem, hardware, chunk_bytes=DEFAULT_CHUNK_BYTES, **goal)
        assert plan.predicted is not None
        return plan.predicted.step_s

    def group_offload(self, hardware: Hardware) -> Way:
        """diffusers' group offload for all components; the VAE moves as a whole."""
        played = {c.name: play_group_offload(c.cut.problem, hardware) for c in self.components if c.cut is not None}
        peak = max(
            c.activations + (played[c.name].device_bytes if c.name in played else c.weights) for c in self.components
        )
        return Way(forward_s=played["transformer"].timeline.step_s, nbytes=peak)


def plan(model: str, gpus: str, planned: Planned) -> Row:
    """A row.  ``planned``: the pipeline, traced for as many ranks."""
    on, budget = GPUS[gpus], GPUS[gpus].budget * GIB
    hardware, components = load_profile(on.profile), planned.components
    all_resident, group = planned.forward_s(hardware, None), planned.group_offload(hardware)
    total = sum(c.weights for c in components) + max(c.activations for c in components)
    ways = {
        COMPILED: Way(forward_s=all_resident, nbytes=total),
        MODEL: Way(forward_s=all_resident, nbytes=max(c.weights + c.activations for c in components)),
        GROUP: group,
    }
    least, curve = least_budget(components, hardware), dict[int, float]()
    if least <= budget:
        sizes = [size * GIB for size in CURVE] if on.ranks == 1 else []
        for nbytes in sorted({least, budget, *(n for n in (group.nbytes, *sizes) if least <= n < budget)}):
            fastest = min(curve.values(), default=2 * all_resident)  # no budget is faster than all weights on the GPU
            curve[nbytes] = fastest if fastest <= 1.0001 * all_resident else planned.forward_s(hardware, nbytes)
        ways[CHUNKFLOW] = Way(forward_s=curve[budget], nbytes=budget)
        if group.nbytes in curve:
            ways[IN_ITS_MEMORY] = Way(forward_s=curve[group.nbytes], nbytes=group.nbytes)
        if on.ranks == 1:
            ways |= _in_less_host_memory(planned, hardware, budget)
    return Row(
        workload=preset(model).workload(),
        gpus=gpus,
        least=least,
        ways=ways,
        curve=[*curve.items()],
        host=planned.host(),
        host_packed=planned.host(pack=True),
    )


def _in_less_host_memory(planned: Planned, hardware: Hardware, budget: int) -> dict[str, Way]:
    """The same budget with packed weights, and with ``host_memory`` where the weights do not fit 32 GB of RAM."""
    cut, ways = planned.cut, dict[str, Way]()
    ways[PACKED] = Way(forward_s=planned.forward_s(hardware, budget, packed(cut, packable(cut)).problem), nbytes=budget)
    part = HOST_OF_32_GB / planned.host()
    if part < 1:  # compile divides it over the components by their bytes
        names = for_the_drive(planned.traced.large, int(part * cut.problem.total_bytes))
        problem = with_drive(cut.problem, names)
        for name, rate in DRIVES.items():
            seconds = planned.forward_s(replace(hardware, drive_bandwidth=rate), budget, problem)
            ways[name] = Way(forward_s=seconds, nbytes=budget)
    return ways


def plan_again(models: Sequence[str], path: Path = PLANNED) -> None:
    """Plan the models, and keep the rows of others; the file is written after each row."""
    quiet_diffusers()
    order = list(cases())
    todo = sorted((case for case in order if case[0] in models), key=lambda case: GPUS[case[1]].ranks)
    traced = dict[tuple[str, int], Planned]()
    for model, gpus in tqdm(sorted(todo, key=lambda c: (GPUS[c[1]].ranks, models.index(c[0]))), desc="rows"):
        ranks = GPUS[gpus].ranks
        if (model, ranks) not in traced:
            traced = {(model, ranks): Planned(model, ranks)}
        found = {(row.workload.model, row.gpus): row for row in (planned(path) if path.exists() else [])}
        found[model, gpus] = plan(model, gpus, traced[model, ranks])
        rows = [_as_json(found[case]) for case in order if case in found]  # a case that is gone leaves no row
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
