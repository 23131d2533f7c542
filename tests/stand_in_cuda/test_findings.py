"""What goes wrong on a card without the mends: each test failed on the commit before its mend."""

from __future__ import annotations

import gc
import multiprocessing
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from conftest import WITHIN, fork
from helpers import Stack, UlyssesStack, check_steps, join_closers, on_card
from test_gpu import MIB, compiled
from torch import nn

from chunkflow_compile import ChunkflowError, offload, programs, restore
from chunkflow_compile.catalog.small import Size, small_inputs, small_model
from chunkflow_compile.runtime.cuda import CudaDevice
from chunkflow_compile.runtime.torch_cuda import TorchCuda
from chunkflow_compile.weights.host_buffer import buffer_of

from . import control


def placed(blocks: int = 4, width: int = 256, device: str = "cuda", **options: Any) -> tuple[nn.Module, Any, nn.Module]:
    """An offloaded model, the compiled function, and a twin on the device that computes eagerly."""
    torch.manual_seed(0)
    model, twin = Stack(blocks, width=width).eval(), Stack(blocks, width=width).eval().to(device)
    twin.load_state_dict(model.state_dict())
    offload(model, device, min_bytes=4096)
    return model, compiled(model, **options), twin


def steps(run: Any, twin: nn.Module, n: int = 4) -> None:
    check_steps(run, twin, n, (16, 8), "cuda")


def test_a_failed_pin_leaves_no_error_pending() -> None:
    control.settings(pins=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, run, twin = placed()
        steps(run, twin)
    assert sum("could not be pinned" in str(w.message) for w in told) == 1


def test_copies_have_one_stream_for_the_life_of_the_process() -> None:
    taken = (0, -1, -3)  # of streams without a priority, of FSDP, of C++ that asks for a high one
    mine = {torch.cuda.Stream(priority=p).cuda_stream for p in taken for _ in range(32)}
    found = set()
    for _ in range(36):
        device = CudaDevice(TorchCuda(torch.device("cuda", 0)))
        found.add(device.copy.stream.cuda_stream)
        device.close()
    assert len(found) == 1 and not found & mine


@pytest.mark.parametrize("origin", ["cpu", "cuda"])
def test_placing_allocates_no_weight_on_the_card_and_gives_memory_back(origin: str) -> None:
    model = Stack(6, width=1024).to(origin)
    most = max(p.nbytes for p in model.parameters())
    weights = sum(p.nbytes for p in model.parameters())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    offload(model, "cuda", min_bytes=4096)
    assert torch.cuda.max_memory_allocated() - before < most / 4
    assert torch.cuda.memory_reserved() < weights / 4
    restore(model)


@pytest.mark.parametrize("limit", [{}, {"pins": 3}, {"pin_bytes": 8 * MIB}, {"pins": 0, "pinned_allocations": 0}])
def test_pageable_weights_do_not_hold_the_issuing_thread(limit: dict[str, int]) -> None:
    """Copies overlap compute as they do from pinned memory: a step takes less than both one after the other."""
    # Copies take twice as long as compute: a step that hides all of it takes 0.67 of both.
    control.settings(rate=200 * MIB, kernel_us=2000, **limit)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, run, twin = placed(8, width=512)
        xs = [torch.randn(16, 8, device="cuda") for _ in range(5)]
        got = [run(x) for x in xs]
        session = programs(model)[0]
        taken = [(step.step_s, step.copy_s + sum(step.windows.compute_s)) for step in session.measurements[1:]]
    assert (type(session.executor.device.copy).__name__ == "StagedCopies") == bool(limit)
    assert all(torch.equal(g, twin(x)) for g, x in zip(got, xs, strict=True))
    assert session.executor.traffic.copied_bytes >= 4 * session.plan.moved_bytes > 0  # of the steps that were measured
    assert any(took < 0.8 * both for took, both in taken), "in the best of the steps: a busy machine delays some"
    restore(model)


def one_rank_cannot_pin(rank: int) -> None:
    if rank:
        control.settings(pins=0)
    torch.manual_seed(0)
    model, twin = UlyssesStack(3, width=256).eval(), UlyssesStack(3, width=256).eval().cuda()
    twin.load_state_dict(model.state_dict())
    offload(model, "cuda", min_bytes=4096)
    run = compiled(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        check_steps(run, twin, 3, (64, 256), "cuda")
    assert sum("could not be pinned" in str(w.message) for w in told) == rank


def test_pinning_refused_on_one_rank(on_ranks: Callable[..., None]) -> None:
    on_ranks(one_rank_cannot_pin, fresh=True)


def test_pinning_refused_by_address() -> None:
    model, run, twin = placed()
    found = next(p for n, p in model.named_parameters() if "blocks.2" in n and p.dim() > 1)
    buffer = buffer_of(found)
    assert buffer is not None
    control.settings(refused_address=buffer.host.data_ptr())
    with pytest.warns(UserWarning, match=f"The host memory of {buffer.name}"):
        steps(run, twin)


def on_the_second_card(_: int, limit: dict[str, int], folder: str | None) -> None:
    """In a thread that has used no GPU.  ``folder``: of a checkpoint whose weights stay on the drive."""
    control.settings(**limit)

    def work() -> None:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if folder is None:
                model, run, _ = placed(4, device="cuda:1")
                given: dict[str, Any] = {"x": torch.randn(4, 8, device="cuda:1")}
            else:
                model = diffusers.WanTransformer3DModel.from_pretrained(folder)
                offload(model, "cuda:1", min_bytes=4096, host_memory=0)
                run, made = compiled(model), small_inputs("wan", Size(layers=2), 0)
                given = {k: v.to("cuda:1") if torch.is_tensor(v) else v for k, v in made.items()}
            for _ in range(3):
                run(**given)
            session = programs(model)[0]
            assert session.plan.moved_bytes
            staged = type(session.executor.device.copy).__name__ == "StagedCopies"
            assert staged == bool(limit or folder)
            restore(model)
            del model, run, session
            torch._dynamo.reset()
            gc.collect()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(work).result()
    join_closers()
    assert control.contexts() == {1}


@pytest.mark.parametrize("limit", [{}, {"pins": 3}, {"pins": 0, "pinned_allocations": 0}, "drive"])
def test_a_fresh_thread_starts_no_other_gpu(limit: Any, tmp_path: Path) -> None:
    """Nor does one that reads the drive."""
    if limit == "drive":
        small_model("wan", Size(layers=2)).save_pretrained(tmp_path)
        return fork(on_the_second_card, ({}, str(tmp_path)), 1)
    fork(on_the_second_card, (limit, None), 1)


def in_a_child(model: nn.Module, run: Any, send: Any, values: dict[str, torch.Tensor]) -> None:
    said, name = [], "blocks.1.up.weight"
    for work in (lambda: torch.zeros(1, device="cuda"), lambda: run(torch.ones(4, 8)), lambda: restore(model, "cuda")):
        try:
            work()
        except Exception as error:  # noqa: BLE001  (each of them is told)
            said.append(str(error))
    values[name].zero_()
    with torch.no_grad():
        model.get_parameter(name).zero_()
    restore(model)
    right = all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
    gc.collect()  # of what is on the GPU, nothing is freed
    send.send((said, right))


@pytest.mark.parametrize("beside_a_step", [False, True])
def test_a_forked_child_restores(beside_a_step: bool) -> None:
    """It has no GPU and pinned nothing, so it unpins nothing; nor has it the thread that issues the copies of a step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        control.settings(pins=3 if beside_a_step else -1, pinned_allocations=0)
        model, run, twin = placed()
        steps(run, twin, 2)
    stepping = threading.Thread(target=torch.no_grad()(run), args=(torch.randn(16, 8, device="cuda"),))
    if beside_a_step:
        control.settings(rate=MIB)  # half a second for each weight
        copies = programs(model)[0].executor.device.copy
        stepping.start()
        while copies._newest.done():
            time.sleep(0.01)
    pinned, values = control.pinned_bytes(), {k: v.cpu() for k, v in twin.state_dict().items()}
    receive, send = multiprocessing.Pipe(False)
    child = multiprocessing.get_context("fork").Process(target=in_a_child, args=(model, run, send, values))
    child.start()
    send.close()
    try:
        assert receive.poll(WITHIN), "the child hangs"
        said, right = receive.recv()
        child.join()
    finally:
        child.kill()
    control.settings(**control.DEFAULTS)
    if beside_a_step:
        stepping.join()
    assert len(said) == 3 and all("Cannot re-initialize CUDA in forked subprocess" in each for each in said), said
    assert right and child.exitcode == 0
    assert control.pinned_bytes() == pinned
    steps(run, twin, 2)
    restore(model)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_measuring_is_read_after_the_step_is_issued(monkeypatch: pytest.MonkeyPatch) -> None:
    model, run, _ = placed()
    run(torch.randn(4, 8, device="cuda"))
    order: list[str] = []
    device = programs(model)[0].executor.device
    read, finish = device._clock._read, device.finish
    monkeypatch.setattr(device._clock, "_read", lambda frame: (order.append("read"), read(frame)))
    monkeypatch.setattr(device, "finish", lambda *given: (order.append("issued"), finish(*given)))
    for _ in range(3):
        torch.cuda.synchronize()
        run(torch.randn(4, 8, device="cuda"))
    assert order[0] == "issued" and "read" in order


def test_resident_weights_are_copied_from_pinned_memory() -> None:
    """Those that are dropped with their model are not reused under a step."""
    model, run, twin = placed(policy="resident")
    x, large = torch.randn(4, 8, device="cuda"), sum(p.nbytes >= 4096 for p in twin.parameters())
    with control.counted() as made:
        run(x)
    assert made["copies to the device, pinned"] >= large and "copies to the device, pageable" not in made
    device = programs(model)[0].executor.device
    kept: list[torch.Tensor] = []
    device.cuda.record_stream = lambda memory, stream: kept.append(memory)
    with torch.cuda.stream(torch.cuda.Stream()):
        run(x)
    assert len(kept) >= large


def test_restoring_to_the_card_copies_before_it_unpins() -> None:
    model, run, twin = placed()
    with control.counted() as made:
        steps(run, twin, 1)
    registered = made["cudaHostRegister"]
    with control.counted() as made:
        restore(model, "cuda")
    assert not made.get("copies to the device, pageable") and registered > 0
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert made["cudaHostUnregister"] == registered


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_is_refused() -> None:
    model, run, twin = placed()
    steps(run, twin, 1)
    x = torch.randn(16, 8, device="cuda")
    with pytest.raises(Exception, match="records a CUDA graph"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        run(x)
    steps(run, twin, 2)
    restore(model)


def an_error_sticks(_: int) -> None:
    with torch.no_grad():
        model, run, twin = placed(12, width=128)
        values = {k: v.cpu() for k, v in twin.state_dict().items()}
        steps(run, twin, 2)
        x = torch.randn(16, 8, device="cuda")
        torch.cuda.synchronize()
        control.set_device_broken(True)
        with pytest.raises(Exception, match=r"GPU failed|launch failure|CUDA error"):
            run(x)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            restore(model, "cpu")
        assert all(torch.equal(v, values[k]) for k, v in model.state_dict().items())
        del model, run
        torch._dynamo.reset()


def test_an_error_that_sticks_loses_no_weight() -> None:
    fork(an_error_sticks, (), 1)


@pytest.mark.parametrize("left", range(3))
def test_out_of_memory_leaves_the_model_intact(left: int) -> None:
    """At each allocation in turn: the arena, the residents, the activations."""
    model, run, twin = placed(8, width=1024, policy="chunkflow", weight_memory=40 * MIB)
    values = {k: v.cpu() for k, v in twin.state_dict().items()}
    x = torch.randn(16, 8, device="cuda")
    torch.cuda.empty_cache()
    control.settings(allocations=left)
    try:
        with pytest.raises(Exception, match=r"no room|out of memory"):
            run(torch.randn(1 << 15, 8, device="cuda") if left > 1 else x)
    finally:
        control.settings(allocations=-1)
    assert torch.equal(run(x), twin(x))
    restore(model)
    assert all(torch.equal(v.cpu(), values[k]) for k, v in model.state_dict().items())


def test_bindings_newer_than_the_driver_do_not_matter() -> None:
    """The environment has cuda.bindings, whose runtime finds no driver that is new enough."""
    pytest.importorskip("cuda.bindings")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, run, twin = placed()
        steps(run, twin)
    restore(model)


def test_a_weight_has_no_memory_on_the_card() -> None:
    """C++ that asks for the memory gets an error, and not the address of something else."""
    model, _, twin = placed()
    weight, same = (next(p for p in m.parameters() if p.numel() > 4096) for m in (model, twin))
    assert weight.is_cuda
    with pytest.raises((RuntimeError, ChunkflowError), match=r"data_ptr|storage|not allocated"):
        weight.data_ptr()
    assert torch.equal(weight.detach() + 1, same.detach() + 1)


def test_tables_are_moved_once() -> None:
    """Qwen-Image moves its rotary tables from the CPU in forward: no step may wait for that."""
    size = Size(layers=2, heads=4, head_dim=32, frames=2, height=16, width=16, text=16)
    torch.manual_seed(0)
    model, twin = small_model("qwen-image", size).eval(), small_model("qwen-image", size).eval().cuda()
    twin.load_state_dict(model.state_dict())
    offload(model, "cuda", min_bytes=4096)
    run = compiled(model)
    for step in range(4):
        inputs = on_card(small_inputs("qwen-image", size, step))
        with control.counted() as made:
            got = run(**inputs)[0]
        if step:
            assert "copies to the device, pageable" not in made and "cudaStreamSynchronize" not in made
        assert torch.equal(got, twin(**inputs)[0])
