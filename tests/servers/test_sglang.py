"""The plug-in of SGLang-diffusion, loaded by SGLang's own loader, on its own transformers, arguments, stage and pipeline."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

if find_spec("sglang") is None:
    pytest.skip("sglang is not installed here: make test-sglang makes an environment with it", allow_module_level=True)

import sglang_parts
from sglang_parts import MEMORY, MODELS, OPTIONS

from chunkflow_compile import cycles, programs
from chunkflow_compile.model.placement import placement_of
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.servers import sglang as plugin_module
from chunkflow_compile.servers.settings import Settings
from chunkflow_compile.units import parse_bytes
from chunkflow_compile.weights.host_weight import HostWeight


@pytest.fixture(scope="module", autouse=True)
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a worker of the server: with the plug-in, as the one rank."""
    torch.set_num_threads(1)
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    sglang_parts.load_sglang()
    sglang_parts.join_ranks()
    yield
    dist.destroy_process_group()


class Served:
    """A transformer that a pipeline of SGLang serves, and its twin, which runs eagerly on the same weights."""

    def __init__(self, folder: Path, name: str, **given: Any) -> None:
        self.args = sglang_parts.arguments(folder, name, **given)
        self.twin, self.inputs = sglang_parts.transformer(self.args, name)
        self.model, _ = sglang_parts.transformer(self.args, name)
        self.pipe = sglang_parts.pipeline(self.model, self.args)
        self.worst = 0.0

    def request(self, size: int = 8, steps: int = 4) -> None:
        """A request: steps whose inputs differ.  Notes the largest difference from the twin."""
        world = dist.get_world_size()
        with sglang_parts.request(world):
            for _ in range(steps):
                inputs = self.inputs(size)
                expected = self.twin(**inputs)
                self.worst = max(self.worst, float((self.model(**inputs) - expected).abs().max()))
                programs(self.model)[0].arena.cycles.wait_planned()

    def moved(self) -> tuple[int, int]:
        """Programs, and the bytes that the newest step copied: those of its plan, within the budget."""
        route = cycles(self.model)[0]
        plan = route.cycle.plan
        assert 0 < plan.device_bytes <= parse_bytes(MEMORY, "memory")
        assert route.measurements[-1].moved_bytes == plan.moved_bytes > 0
        return len(programs(self.model)), plan.moved_bytes

    def told(self, name: str) -> str:
        """A line for the report of the tests, of a model at two sizes."""
        count, moved = self.moved()
        weights = sum(p.nbytes for p in self.twin.parameters())
        return f"{name} {count} programs, {moved} of {weights} bytes a step, largest difference {self.worst}"


def compiled() -> int:
    return int(counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", MODELS)
def test_a_transformer_streams_within_memory(
    name: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    served = Served(tmp_path, name)
    assert any(isinstance(p.data, HostWeight) for p in served.model.parameters())
    served.request()
    _, moved = served.moved()
    first = compiled()
    served.request(size=12)
    served.request(size=16)
    later = compiled()
    served.request(size=8)
    served.request(size=20)
    assert served.moved()[1] == moved
    assert served.worst == 0
    assert not counters["graph_break"]
    assert later <= 2 * first and compiled() == later, "new sizes compile once more, then nothing does"
    record_property("counts", served.told(f"SGLang's {name}, one rank:"))


def serve_all(rank: int, folder: str, counts: str) -> None:
    sglang_parts.load_sglang()
    sglang_parts.join_ranks()
    for name in MODELS:
        torch._dynamo.reset()
        served = Served(Path(folder) / f"{name}{rank}", name, num_gpus=2, ulysses_degree=2)
        served.request()
        served.request(size=12)
        served.moved()
        assert served.worst == 0
        assert any("all_to_all_single" in str(program.program) for program in programs(served.model)), name
        with open(f"{counts}{rank}", "a") as file:
            print(served.told(f"SGLang's {name}, Ulysses 2, rank {rank}:"), file=file)


def test_two_ranks_stream_with_ulysses(
    on_ranks: Callable[..., None], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    on_ranks(serve_all, str(tmp_path), str(tmp_path / "counts"), fresh=True)
    for rank in range(2):
        for line in (tmp_path / f"counts{rank}").read_text().splitlines():
            record_property("counts", line)
