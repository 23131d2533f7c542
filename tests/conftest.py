"""Shared parts of the tests: real diffusers classes, small and random; real gloo ranks; real threads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

# Where models and profiles for tests lie.
HERE = Path(__file__).parent

# Weights of 4 KiB are "large", chunks small enough that weights have several, on a machine on which they hide.
OPTIONS: dict[str, Any] = {
    "min_bytes": 4096,
    "chunk_bytes": 4096,
    "hardware": str(HERE / "slow_compute.json"),
    "slowdown": 1.0,
}

# The same with all weights on the device.
RESIDENT: dict[str, Any] = {**{k: v for k, v in OPTIONS.items() if k != "slowdown"}, "policy": "resident"}

# A model of two blocks for the command line, and options there at which it streams.
MODEL = f"{HERE / 'two_blocks.py'}:stack"
SIZES = ("--hardware", "cpu", "--min-bytes", "0", "--chunk-bytes", "4096", "--slowdown", "1.5")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def quiet_diffusers() -> None:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore", module="diffusers")


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _enter(rank: int, world: int, folder: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    try:
        with torch.no_grad():
            work(rank, *args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., None]:
    """Runs ``work(rank, *args)`` on two gloo ranks, each a process; fails if one of them does."""

    def start(work: Callable[..., None], *args: Any, world: int = 2) -> None:
        torch.multiprocessing.spawn(_enter, (world, str(tmp_path), work, args), nprocs=world)

    return start


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests counted, as they asked with ``record_property("counts", ...)``."""
    said = [v for r in terminalreporter.getreports("passed") for k, v in r.user_properties if k == "counts"]
    if said:
        terminalreporter.section("counts")
        for line in sorted(said):
            terminalreporter.line(line)
