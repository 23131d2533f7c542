"""The stand-in records what a capture is given and replays it as a graph: by torch.cuda.graph, without chunkflow."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from test_gpu import MIB
from torch.cuda import Event, Stream

from . import control

LAYERS = 4
WIDTH = 32
NOT_PERMITTED = "not permitted when stream is capturing"


def capture(
    work: Callable[[], Any], graph: Any = None, pool: Any = None, mode: str = "thread_local"
) -> tuple[Any, Any]:
    """The graph of ``work``, and what it returned."""
    graph, pool = graph or torch.cuda.CUDAGraph(), pool or torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, capture_error_mode=mode):
            out = work()
    except RuntimeError:  # torch 2.11 would never leave the pool, and empty_cache would free nothing any more
        torch._C._cuda_endAllocateToPool(0, pool)
        torch._C._cuda_releasePool(0, pool)
        raise
    return graph, out


class Streamed:
    """A step of layers whose weights are copied to two slots, and at its end one copy that no layer waits for."""

    def __init__(self, without: str = "") -> None:
        self.without = without
        self.hosts = [torch.randn(WIDTH, WIDTH).pin_memory() for _ in range(LAYERS)]
        self.slots = [torch.zeros(WIDTH, WIDTH, device="cuda") for _ in range(2)]
        self.first = torch.zeros(WIDTH, WIDTH, device="cuda")
        self.x = torch.zeros(8, WIDTH, device="cuda")
        self.copies = Stream()

    def _copy(self, target: torch.Tensor, host: torch.Tensor) -> Event:
        with torch.cuda.stream(self.copies):
            target.copy_(host, non_blocking=True)
        return self.copies.record_event(Event())

    def step(self) -> torch.Tensor:
        compute = torch.cuda.current_stream()
        self.copies.wait_event(compute.record_event(Event()))
        arrivals = [self._copy(slot, host) for slot, host in zip(self.slots, self.hosts, strict=False)]
        y = self.x
        for i in range(LAYERS):
            if self.without != f"arrival {i}":
                compute.wait_event(arrivals[i])
            y = torch.tanh(y @ self.slots[i % 2])
            if i + 2 < LAYERS:
                if self.without != f"opening {i}":
                    self.copies.wait_event(compute.record_event(Event()))
                arrivals.append(self._copy(self.slots[i % 2], self.hosts[i + 2]))
        last = self._copy(self.first, self.hosts[0])
        if self.without != "join":
            compute.wait_event(last)
        return y

    def expected(self) -> torch.Tensor:
        y = self.x.cpu()
        for host in self.hosts:
            y = torch.tanh(y @ host)
        return y

    def replays_are_equal(self) -> bool:
        graph, y = capture(self.step)
        equal = True
        for _ in range(4):  # with two streams: each combination of a slow one and a fast one
            for host in self.hosts:
                host.copy_(torch.randn(WIDTH, WIDTH))
            self.x.copy_(torch.randn(8, WIDTH, device="cuda"))
            graph.replay()
            after = y + self.first.sum()  # queued after the graph
            torch.cuda.synchronize()
            equal &= torch.equal(after.cpu(), self.expected() + self.hosts[0].sum())
        return equal


@pytest.mark.parametrize("without", ["", "opening 0", "opening 1", "arrival 0", "arrival 3"])
def test_a_replay_reads_the_bytes_of_then_in_the_order_of_the_events(without: str) -> None:
    control.settings(pause_us=8000)
    assert Streamed(without).replays_are_equal() == (not without)


@triton.jit
def nothing(x, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x + tl.arange(0, BLOCK), 0.0)


def test_what_a_replay_counts() -> None:
    def work() -> torch.Tensor:
        streamed.step()
        nothing[(1,)](streamed.x, BLOCK=16)
        return torch.rand(64, device="cuda")

    streamed, graph = Streamed(), torch.cuda.CUDAGraph(keep_graph=True)
    graph.register_generator_state(torch.cuda.default_generators[0])
    work()  # compiles the kernel
    with control.counted() as made:
        graph, x = capture(work, graph)
    assert made["cudaMemcpyAsync"] == LAYERS + 1
    assert not made.keys() & {"copies to the device, pinned", "launches of Triton"}, "nothing runs in a capture"
    nodes = ctypes.c_size_t()
    assert not control.runtime().cudaGraphGetNodes(ctypes.c_void_p(graph.raw_cuda_graph()), None, ctypes.byref(nodes))
    assert nodes.value == 3 * LAYERS + 3, "a copy, a product and a tanh of each layer"
    graph.instantiate()
    numbers = []
    for _ in range(2):
        with control.counted() as made:
            graph.replay()
            torch.cuda.synchronize()
        numbers.append(x.tolist())
        assert {name: n for name, n in made.items() if "replayed" in name or "Graph" in name} == {
            "cudaGraphLaunch": 1,
            "copies to the device, pinned, replayed": LAYERS + 1,
            "kernels of aten, replayed": 2 * LAYERS + 1,
            "launches of Triton, replayed": 1,
        }
        assert not made.keys() & {"cudaMemcpyAsync", "launches of Triton", "cudaEventRecordWithFlags"}
    assert numbers[0] != numbers[1] and all(0 <= number < 1 for number in numbers[0])


def test_a_fork_that_is_not_joined() -> None:
    streamed = Streamed("join")
    with pytest.raises(RuntimeError, match="has unjoined work"):
        capture(streamed.step)
    assert not torch.cuda.is_current_stream_capturing()
    streamed.without = ""
    assert streamed.replays_are_equal()


def _waits_outside() -> None:
    with torch.cuda.stream(Stream()):
        outside = torch.cuda.current_stream().record_event()
    torch.cuda.current_stream().wait_event(outside)


def _allocates() -> None:
    torch.cuda.check_error(control.runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096)))


CASES: list[tuple[Callable[[], Any], str]] = [
    (torch.cuda.synchronize, NOT_PERMITTED),
    (lambda: torch.cuda.current_stream().synchronize(), NOT_PERMITTED),
    (lambda: torch.cuda.current_stream().query(), NOT_PERMITTED),
    (lambda: Stream().synchronize(), NOT_PERMITTED),
    (lambda: torch.ones(2, device="cuda").nonzero(), NOT_PERMITTED),
    (lambda: torch.ones(2, device="cuda")[0].item(), NOT_PERMITTED),
    (lambda: torch.ones(2, 3, device="cuda").t().copy_(torch.ones(3, 2)), NOT_PERMITTED),
    (_allocates, NOT_PERMITTED),
    (_waits_outside, "dependency created on uncaptured work"),
    (lambda: torch.cuda.current_stream().record_event().query(), "last recorded in a capturing stream"),
    (lambda: torch.cuda.current_stream().record_event().synchronize(), "last recorded in a capturing stream"),
]


@pytest.mark.parametrize(("forbidden", "message"), CASES)
def test_what_a_capture_forbids_ends_it(forbidden: Callable[[], Any], message: str) -> None:
    def work() -> None:
        x.add_(1)
        with pytest.raises(RuntimeError, match=message):
            forbidden()
        with pytest.raises(RuntimeError, match=r"previous error during capture|CUDA error: 901"):
            x.add_(1)

    x = torch.zeros(4, device="cuda")
    with pytest.raises(RuntimeError, match="previous error during capture"):
        capture(work)
    with torch.cuda.stream(torch.cuda.graph.default_capture_stream):
        assert (x + 1).sum().item() == 4, "the stream is as before, and nothing that was captured has run"
    graph, _ = capture(lambda: x.add_(1))
    graph.replay()
    assert x.sum().item() == 4


def test_an_event_of_a_capture_is_of_no_use_outside() -> None:
    _, event = capture(lambda: (torch.zeros(4, device="cuda"), torch.cuda.current_stream().record_event())[1])
    with pytest.raises(RuntimeError, match="dependency created on uncaptured work"):
        Stream().wait_event(event)
    with pytest.raises(RuntimeError, match="last recorded in a capturing stream"):
        event.query()
    event.record()
    event.synchronize()


@pytest.mark.parametrize(("mode", "expected"), [("thread_local", 0), ("relaxed", 0), ("global", 900)])
def test_only_a_global_capture_forbids_what_other_threads_do(mode: str, expected: int) -> None:
    def other_thread(stream: int) -> None:
        errors.append(control.runtime().cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(4096)))
        if mode != "relaxed":
            end = control.runtime().cudaStreamEndCapture
            errors.append(end(ctypes.c_void_p(stream), ctypes.byref(ctypes.c_void_p())))

    def work() -> None:
        x.add_(1)
        thread = threading.Thread(target=other_thread, args=(torch.cuda.current_stream().cuda_stream,))
        thread.start()
        thread.join()

    errors: list[int] = []
    x = torch.zeros(4, device="cuda")
    if expected:
        with pytest.raises(RuntimeError, match="previous error"):
            capture(work, mode=mode)
    else:
        capture(work, mode=mode)[0].replay()
    assert errors == [expected, 908][: 1 if mode == "relaxed" else 2]
    assert x.sum().item() == (0 if expected else 4)


def test_launches_of_one_graph_are_in_order() -> None:
    def work() -> None:
        x.copy_(x + 1)  # two nodes: a launch beside another one would lose an addition

    control.settings(pause_us=3000)
    x = torch.zeros(4, device="cuda")
    graph, _ = capture(work)
    torch.cuda.synchronize()
    for stream in [Stream() for _ in range(3)] * 3:
        with torch.cuda.stream(stream):
            graph.replay()
    graph.reset()  # while launches are under way
    torch.cuda.synchronize()
    assert x.tolist() == [9] * 4


def test_two_graphs_share_a_pool_and_give_it_back() -> None:
    def first() -> torch.Tensor:
        return torch.tanh(x + 1) * 2

    def second() -> torch.Tensor:
        return torch.tanh(x - 1) * 3

    def pool_bytes() -> int:
        return sum(s["total_size"] for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] == pool)

    x, pool = torch.zeros(1 << 20, device="cuda"), torch.cuda.graph_pool_handle()
    g1, y1 = capture(first, pool=pool)
    address = y1.data_ptr()
    del y1
    g2, y2 = capture(second, pool=pool)
    assert y2.data_ptr() == address, "what the first graph computes is not held by what the stand-in recorded"
    for step in range(3):
        x.fill_(step)
        g2.replay()
        got = y2.clone()
        g1.replay()  # into the same memory
        torch.cuda.synchronize()
        assert torch.equal(got, second()) and torch.equal(y2, first())
    assert pool_bytes() >= x.nbytes
    del y2
    g1.reset()
    g2.reset()
    torch.cuda.empty_cache()
    assert pool_bytes() == 0


def test_an_external_event_is_recorded_and_awaited_at_each_launch() -> None:
    def work() -> None:
        torch.cuda.current_stream().wait_event(begins)
        x.mul_(2)
        ends.record()

    begins, ends = Event(external=True), Event(external=True)
    begins.record()  # makes it; torch would not wait for it otherwise
    x, side = torch.ones(4, device="cuda"), Stream()
    graph, _ = capture(work)
    torch.cuda.synchronize()
    control.settings(kernel_us=2000)
    for step in range(3):
        with torch.cuda.stream(side):
            x.fill_(-1)
            x.fill_(step)
            begins.record()
        graph.replay()
        with torch.cuda.stream(side):
            side.wait_event(ends)
            assert x.tolist() == [2 * step] * 4


@pytest.mark.parametrize(
    ("gone", "sentence"),
    [
        ("pin", "a copy reads host memory that was unpinned"),
        ("target", "a copy writes device memory that was freed"),
        ("operand", "A kernel of a graph uses device memory that was freed"),
    ],
)
def test_a_replay_that_uses_what_is_gone_breaks_the_device(
    gone: str, sentence: str, capfd: pytest.CaptureFixture[str]
) -> None:
    def work() -> None:
        held["target"].copy_(host, non_blocking=True)
        held["operand"].add_(1)

    host = torch.ones(8 * MIB)
    address = ctypes.c_void_p(host.data_ptr())
    assert not control.runtime().cudaHostRegister(address, ctypes.c_size_t(host.nbytes), 0)
    held = {name: torch.zeros(8 * MIB, device="cuda") for name in ("target", "operand")}
    graph, _ = capture(work)
    graph.replay()
    torch.cuda.synchronize()
    assert {int(tensor[-1].item()) for tensor in held.values()} == {1}
    if gone == "pin":
        assert not control.runtime().cudaHostUnregister(address)
    else:
        del held[gone]
        torch.cuda.empty_cache()
    graph.replay()
    with pytest.raises(RuntimeError, match="launch failure"):
        torch.cuda.synchronize()
    assert sentence in capfd.readouterr().err
    control.set_device_broken(False)
    if gone != "pin":
        assert not control.runtime().cudaHostUnregister(address)
