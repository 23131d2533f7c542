"""Several models and programs, and their end: which model owns which weights, and what is freed."""

from __future__ import annotations

import ctypes
import gc
import resource
import signal
import threading
import weakref
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import EAGER, RESIDENT, WITHIN, fork
from helpers import Stack, check_steps, stack, twins
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.weights.host_buffer import buffer_of


def compiled(model: nn.Module, **options: object) -> nn.Module:
    goal = {**RESIDENT, "lowering": "eager"} if options.get("policy") == "resident" else EAGER
    return torch.compile(model, backend="chunkflow", fullgraph=True, options={**goal, **options})


def assert_whole(model: nn.Module, seed: int) -> None:
    twin = stack(seed=seed)
    assert all(torch.equal(v, model.state_dict()[n]) for n, v in twin.state_dict().items())
    check_steps(restore(model), twin, 1)


@pytest.mark.parametrize(("policy", "placed_first"), [("chunkflow", False), ("chunkflow", True), ("resident", False)])
def test_two_models_of_one_class_share_code_and_nothing_else(policy: str, placed_first: bool, no_grad: None) -> None:
    """Dynamo shares a compiled graph between them (Wan 2.2 has two such transformers).

    If they were not placed before, the first call of the second one compiles once more, and its weights move.
    """
    models = [stack(seed=seed) for seed in (0, 1)]
    if placed_first:
        for model in models:
            offload(model, min_bytes=4096)
    runs = [compiled(model, policy=policy) for model in models]
    for _ in range(3):
        for seed, run in enumerate(runs):
            check_steps(run, stack(seed=seed), 1)
    sessions = [programs(model) for model in models]
    assert [len(s) for s in sessions] == [1, 1] and sessions[0] != sessions[1]
    assert all(len(s[0].measurements) == 3 for s in sessions)
    restore(models[0])
    check_steps(runs[1], stack(seed=1), 1)
    for seed, model in enumerate(models):
        assert_whole(model, seed)


def test_a_model_made_after_another_was_dropped_runs_on_its_own_weights(no_grad: None) -> None:
    for seed in range(3):
        model = stack(seed=seed)
        check_steps(compiled(model), stack(seed=seed), 1)
        if seed == 1:
            restore(model)
        del model
        gc.collect()


def test_dropping_a_model_frees_its_weights_and_its_thread(no_grad: None) -> None:
    def use() -> tuple[weakref.ref[nn.Module], weakref.ref[torch.Tensor]]:
        model = stack()
        run = compiled(model)
        run(torch.randn(4, 8))
        (session,) = programs(model)
        return weakref.ref(model), weakref.ref(next(iter(session.executor.binding.slots.values())))

    before = set(threading.enumerate())
    model, slot = use()
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        thread.join(WITHIN)
    gc.collect()  # frees what a closing thread held during the first collection
    assert model() is None and slot() is None
    assert not {t for t in threading.enumerate() if t.name.startswith("chunkflow")} - before


def test_a_part_placed_first_and_then_the_whole(no_grad: None) -> None:
    model, twin = stack(), stack()
    check_steps(compiled(model.blocks[0]), twin.blocks[0], 1, (4, 32))
    check_steps(compiled(model), twin, 1)
    assert {w.name for w in programs(model)[-1].plan.streamed} >= {"blocks.1.up.weight", "blocks.1.down.weight"}
    assert len(programs(model)[-1].plan.streamed) == 4
    assert_whole(model, 0)


def test_a_function_over_two_models(no_grad: None) -> None:
    torch.manual_seed(0)
    a, b = (Stack(1, 64).eval() for _ in range(2))
    expected = {id(m): {n: v.clone() for n, v in m.state_dict().items()} for m in (a, b)}
    x = torch.randn(4, 8)
    result = b(a(x))
    with pytest.raises(Exception, match=r"belong to several models.*offload on each of them"):
        compiled(lambda x: b(a(x)))(x)
    for model in (a, b):
        offload(model, min_bytes=4096)
    torch._dynamo.reset()
    run = compiled(lambda x: b(a(x)))
    for _ in range(2):
        torch.testing.assert_close(run(x), result)
    assert len(programs(a)[0].plan.streamed) == 4
    for model in (a, b):
        restore(model)
        assert all(torch.equal(v, expected[id(model)][n]) for n, v in model.state_dict().items())


def test_a_weight_is_offloaded_once_whatever_it_is_a_part_of() -> None:
    model = stack()
    wrapper = nn.Sequential(model)
    offload(wrapper, min_bytes=4096)
    for again in (model, wrapper, nn.Sequential(model.blocks[0], nn.Linear(2, 2))):
        with pytest.raises(ChunkflowError, match=r"offloaded already .*blocks.0.up.weight"):
            offload(again)
    restore(model)
    assert all(buffer_of(p) is None for p in wrapper.parameters())
    assert_whole(model, 0)


def test_weights_made_in_inference_mode_are_streamed_and_reloaded() -> None:
    with torch.inference_mode():
        model = stack()
        run = compiled(model)
        for seed in (0, 1, 2):
            model.load_state_dict(stack(seed=seed).state_dict())
            check_steps(run, stack(seed=seed), 2)


def test_a_parent_that_reads_a_weight_below(no_grad: None) -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.e.weight

    model, x = Reads().eval(), torch.randn(4, 64)
    expected = model(x)
    offload(model, min_bytes=4096)  # with one region, a plan would not stream its only weight
    run = compiled(model)
    for _ in range(2):
        torch.testing.assert_close(run(x), expected)
    assert torch.equal(model(x), expected)
    model.to(memory_format=torch.channels_last)
    assert torch.equal(restore(model)(x), expected)


def ends(rank: int, debug: tuple[str, ...]) -> None:
    """A forked process that ends as ``sys.exit`` ends one, while copies for the next step are under way."""
    signal.alarm(int(WITHIN))  # it fails if it hangs
    torch.set_grad_enabled(False)
    run = compiled(Stack(4).eval(), debug=debug)
    for _ in range(2):
        run(torch.randn(4, 8))
    ctypes.pythonapi.Py_Exit(0)  # what forked it would end it by os._exit, which leaves out the interpreter's end


@pytest.mark.parametrize("debug", [pytest.param((), marks=pytest.mark.long), ("threads",)])
def test_a_process_that_ends_with_copies_under_way_ends_well(debug: tuple[str, ...]) -> None:
    """One that aborts or raises has another exit code."""
    fork(ends, (debug,), 3)


OURS = (
    *("Arena", "Binding", "Variant", "CpuDevice", "Engine", "Executor", "GraphModule"),
    *("HostBuffer", "HostStore", "Placement", "Program", "CompiledGraph", "SingleCall"),
)


def alive() -> Counter[str]:
    """Objects by type, and threads."""
    gc.collect()
    found = Counter(type(o).__name__ for o in gc.get_objects())
    kept = Counter({name: found[name] for name in (*OURS, "Tensor", "Parameter", "FakeTensor")})
    kept["threads"] = threading.active_count()
    return kept


def resident_mib() -> float:
    """Memory of this process, MiB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads the memory of the process from /proc")
@pytest.mark.parametrize(
    ("rounds", "first", "width"), [(6, 3, 512), pytest.param(200, 20, 256, marks=pytest.mark.long)]
)
def test_nothing_is_left_of_rounds_of_compiling_and_restoring(
    rounds: int, first: int, width: int, no_grad: None
) -> None:
    """The process grows by what torch.compile itself keeps of each compilation, about 0.2 MiB."""
    model, twin = twins(lambda: Stack(2, width))
    weights = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
    before: Counter[str] = Counter()
    for number in range(rounds):
        x = torch.randn(4, 8)
        assert torch.equal(compiled(model, policy="layerwise", slowdown=None)(x), twin(x))
        restore(model)
        torch._dynamo.reset()
        gc.collect()  # torch's compilations are cycles, which hold what they compiled
        if number == first - 1:
            before, memory = alive(), resident_mib()
    after, grown = alive(), resident_mib() - memory
    kept = {name: (before[name], after[name]) for name in after if after[name] > before[name]}
    assert not kept, kept
    assert grown < (rounds - first) * weights / 2, "MiB: half of all weights, if no round freed its weights"
