"""Shared parts of the tests: real diffusers classes, small and random; real gloo ranks; real threads."""

from __future__ import annotations

import gc
import multiprocessing.forkserver
import os
import signal
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

# Before torch is imported.  Otherwise every stream's thread starts a team of OpenMP threads, which spin for the cores.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # of processes that set their number of threads
# Two tests run at once, on two cores: Inductor needs no threads or processes beside them.
os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
# Inductor need not try, in each process, which instructions the compiler and the processor have: that takes 7 s of CPU time.
# With a compiler that is older than the processor, set this to an empty string.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
# Mutated programs leave collectives without a completion, and torch warns of each when the process ends.
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
# Tests read and write no folder of this user.
os.environ["CHUNKFLOW_CACHE"] = "0"
os.environ["DIFFUSERS_VERBOSITY"] = "error"  # read when a test imports diffusers; most need not

import hypothesis
import pytest
import torch
import torch.distributed as dist
from ranks import Ranks, as_rank
from torch._dynamo.utils import counters

from chunkflow_compile.passes import pieces

# For a line of its log, Dynamo measures the guards of each compilation, and evicts the caches of the processor before.
torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0

# An example may take as long as it likes, and so may its making: on a machine with other work, 200 ms pass in any of them.
hypothesis.settings.register_profile(
    "chunkflow", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("chunkflow")

# Seconds after which a test that waits for something gives up: it hangs, on however slow a machine.
WITHIN = 300.0
# Seconds after which ranks that have not ended a test hang.
HANGS = 4 * WITHIN

# What tests find: the processes of a session fork from one that must not have what a test has set.
ENVIRONMENT = dict(os.environ)

# Where models and profiles for tests lie.
HERE = Path(__file__).parent

# Weights of 4 KiB are "large", chunks small enough that weights have several, on a machine on which they hide.
OPTIONS: dict[str, Any] = {
    "min_bytes": 4096,
    "chunk_bytes": 4096,
    "hardware": str(HERE / "slow_compute.json"),
    "slowdown": 1.0,
}

# The same without compiled kernels: what a model gives is what it gives without ChunkFlow, bit for bit.
EAGER: dict[str, Any] = {**OPTIONS, "lowering": "eager"}

# A machine on which the copies of the first block begin in the step before.
WRAPS = str(HERE / "short_edges.json")

# A machine on which no copy hides: weights stay on the device as far as they may.
FAST = str(HERE / "fast_compute.json")

# The same with all weights on the device.
RESIDENT: dict[str, Any] = {**{k: v for k, v in OPTIONS.items() if k != "slowdown"}, "policy": "resident"}

# A model of two blocks for the command line, and options there at which it streams.
MODEL = f"{HERE / 'two_blocks.py'}:stack"
SIZES = ("--hardware", "cpu", "--min-bytes", "0", "--chunk-bytes", "4096", "--slowdown", "1.5")


@pytest.fixture(autouse=True)
def fresh_dynamo(request: pytest.FixtureRequest) -> Iterator[None]:
    """Resets Dynamo before and after each test; for a test that uses ``kept_dynamo``, only its counters."""
    keeps = "kept_dynamo" in request.fixturenames and request.node.get_closest_marker("long") is None
    if not keeps:
        torch._dynamo.reset()
    counters.clear()
    yield
    if not keeps:
        torch._dynamo.reset()


@pytest.fixture(scope="module")
def kept_dynamo() -> Iterator[None]:
    """The tests of a module that use this fixture share what Dynamo compiles: another model of the same class, with the same
    options, runs the code that an earlier test has compiled.  Tests with the marker ``long`` compile anew."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Compilation allocates so much that the collector, at its defaults, takes a tenth of the time.
gc.set_threshold(20_000, 20, 20)


@pytest.fixture(autouse=True, scope="module")
def frozen() -> None:
    """Hides the half million objects of imports and earlier modules from the collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bars of progress."""
    monkeypatch.setenv("CHUNKFLOW_PROGRESS", "0")


@pytest.fixture
def applied(quiet: None) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Applies a small pipeline: ``applied("wan", memory="1MiB", **options)`` gives it and its budget.

    At the end of the test it is removed, and is then as the plain one, bit for bit.
    """
    pytest.importorskip("transformers")
    import pipelines

    from chunkflow_compile import apply, remove

    made: list[tuple[str, Any]] = []

    def start(name: str = "wan", memory: int | str = "1MiB", **options: Any) -> tuple[Any, Any]:
        pipe = pipelines.small_pipeline(name)
        assert apply(pipe, memory=memory, **{**pipelines.EAGER, **options}) is pipe
        made.append((name, pipe))
        return pipe, pipelines.budget_of(pipe)

    yield start
    for name, pipe in made:
        assert remove(pipe) is pipe and pipelines.is_plain(pipe)
        assert pipelines.same_weights(pipe, pipelines.plain(name))


@pytest.fixture(scope="session")
def traces() -> dict[tuple[Any, ...], Any]:
    """What the command line has traced of the models in ``two_blocks.py``."""
    return {}


@pytest.fixture
def traced_once(traces: dict[tuple[Any, ...], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command line traces each model in ``two_blocks.py`` once in a run of pytest, for each number of ranks."""
    from chunkflow_compile.cli import planning_arguments

    trace = planning_arguments._trace

    def traced(arguments: Any, work: Callable[[], Any]) -> Any:
        if not arguments.model.startswith(f"{HERE / 'two_blocks.py'}:"):
            return trace(arguments, work)
        key = (arguments.model, arguments.ulysses, arguments.cfg_parallel, arguments.min_bytes)
        if key not in traces:
            traces[key] = trace(arguments, work)
        return traces[key]

    monkeypatch.setattr(planning_arguments, "_trace", traced)


@pytest.fixture
def no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield


def _enter(rank: int, world: int, folder: str, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    gc.freeze()
    warnings.filterwarnings("ignore")
    as_rank(rank, world, f"{folder}/meet", work, args)


def forking() -> Any:
    """Starts processes by a fork of one that has imported ``warm`` and has no threads; by spawn where there is a GPU, which
    torch cannot use after a fork."""
    if torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["warm"])
    path = os.pathsep.join(filter(None, [str(HERE), ENVIRONMENT.get("PYTHONPATH")]))
    with mock.patch.dict(os.environ, {**ENVIRONMENT, "PYTHONPATH": path}, clear=True):
        multiprocessing.forkserver.ensure_running()
    return context


def fork(work: Callable[..., None], args: tuple[Any, ...], nprocs: int, join: bool = True) -> Any:
    """As torch.multiprocessing.spawn, but without its imports."""
    method = forking().get_start_method()
    return torch.multiprocessing.start_processes(work, args, nprocs=nprocs, join=join, start_method=method)


@pytest.fixture(scope="session")
def pools() -> Iterator[dict[int, Ranks]]:
    """The rank processes that all tests of a run of pytest share, by their number."""
    found: dict[int, Ranks] = {}
    yield found
    for ranks in found.values():
        ranks.close()


@pytest.fixture
def on_ranks(pools: dict[int, Ranks], tmp_path: Path) -> Callable[..., None]:
    """Runs ``work(rank, *args)`` on two gloo ranks, each a process; fails if one of them does.

    The ranks are the same processes for all tests, each time in another process group.  ``fresh``: they are new ones, for
    tests that end or fork ranks, or that count what a whole process holds.
    """

    def start(work: Callable[..., None], *args: Any, world: int = 2, fresh: bool = False) -> None:
        if fresh:
            return fork(_enter, (world, str(tmp_path), work, args), world)
        if world not in pools:
            pools[world] = Ranks(world, forking(), HANGS)
        try:
            pools[world].run(work, args)
        except BaseException:
            pools.pop(world).close(kill=True)
            raise

    return start


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A real process group of one rank: its collectives are real, and return their input."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    with torch.no_grad():
        yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def small_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sharded weights of a few KiB have several stripes, and chunks begin and end within the parts of a rank."""
    monkeypatch.setattr(pieces, "STRIPE", 1536)


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the package start as ranks of the tests do, by ``fork``; those of the demo test by spawn, as for a user."""
    from chunkflow_compile.bench import ranks
    from chunkflow_compile.hardware import rank_figures

    for module in (ranks, rank_figures):
        monkeypatch.setattr(module, "spawn", fork)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What tests counted, as they asked with ``record_property("counts", ...)``."""
    said = [v for r in terminalreporter.getreports("passed") for k, v in r.user_properties if k == "counts"]
    if said:
        terminalreporter.section("counts")
        for line in sorted(said):
            terminalreporter.line(line)


def in_a_child(work: Callable[[], object]) -> bool:
    """Whether ``work`` is true in a forked process, which ends then."""
    if child := os.fork():
        return os.waitpid(child, 0)[1] == 0
    signal.alarm(int(WITHIN))
    try:
        os._exit(not work())
    finally:
        os._exit(2)
