"""The emulated link: transfers take as long as on a real link of its bandwidth, alone and shared."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from clocks import OwnClock
from conftest import OPTIONS, forking
from helpers import Stack
from hypothesis import given
from hypothesis import strategies as st

from chunkflow_compile import Arena, programs
from chunkflow_compile.bench.link_load import chain
from chunkflow_compile.hardware.emulated import on_emulated_link
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.runtime.device import CpuDevice, ThreadsDevice
from chunkflow_compile.runtime.link import LANES, LaneName, Port, Wire, _Lane

MIB = 1 << 20


def wire(order: str = "fair", quantum: int = 256 << 10) -> Wire:
    return Wire(LinkEmulation(bandwidth=1e6, order=order, quantum=quantum), [_Lane() for _ in range(4)])


def finish(found: Wire, lane: int) -> float:
    found.advance(float("inf"), lane)
    return found.lanes[lane].over


def test_two_transfers_share_a_fair_link_and_follow_each_other_on_a_fifo() -> None:
    for order, first, second in (("fair", 2.0, 2.0), ("fifo", 1.0, 2.0)):
        found = wire(order, 1000)
        for lane in (0, 1):
            found.add(lane, 1e6, 0.0)
        assert finish(found, 0) == pytest.approx(first, abs=0.01)
        assert finish(found, 1) == pytest.approx(second, abs=0.01)


def test_ranks_behind_one_port_take_as_long_as_planned() -> None:
    """Copies of four ranks, which begin at once; one that is alone has the whole port."""
    emulation = LinkEmulation(bandwidth=1e7, quantum=10_000, shared="port")
    machine = on_emulated_link(load_profile("cpu"), emulation, 4)
    for ranks in (1, 4):
        port = Wire(emulation, [_Lane() for _ in range(4 * len(LANES))])
        for rank in range(ranks):
            port.add(rank * len(LANES), 1e7, 0.0)
        last = max(finish(port, rank * len(LANES)) for rank in range(ranks))
        assert last == pytest.approx(1e7 / machine.shared_by(ranks).copy_rate, rel=1e-6)


def test_a_later_transfer_gets_half_of_the_link_from_then_on() -> None:
    found = wire(quantum=1000)
    found.add(0, 1e6, 0.0)
    found.advance(0.5)
    found.add(1, 1e6, 0.0)
    assert finish(found, 0) == pytest.approx(1.5, abs=0.01) and finish(found, 1) == pytest.approx(2.0, abs=0.01)


@pytest.mark.parametrize("begun", [0.1, 0.4, 0.9, 1.0, 7.4])
def test_a_newcomer_waits_for_the_rest_of_a_quantum(begun: float) -> None:
    """``begun``: quanta that the other lane has carried before the newcomer."""
    found = wire(quantum=1000)
    found.add(0, 1e6, 0.0)
    found.advance(begun / 1e3)
    found.add(1, 1000, 0.0)
    assert finish(found, 1) == pytest.approx((math.ceil(begun) + 1) / 1e3, rel=1e-6)
    assert finish(found, 0) == pytest.approx(1.001)


def test_a_sender_that_wakes_up_late_gets_idle_time_but_not_twice() -> None:
    found = wire()
    found.advance(1.0)
    found.add(0, 1e6, 0.5)
    found.add(1, 1e6, 0.5)  # the idle half second is used up; it shares with lane 0
    assert finish(found, 1) == pytest.approx(2.5, abs=0.3)
    finish(found, 0)
    assert max(lane.over for lane in found.lanes) == pytest.approx(2.5, abs=0.01), "two megabytes from 0.5 on"


@given(
    st.sampled_from(["fair", "fifo"]),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 10**6), st.floats(0, 1), st.floats(0, 0.01)), max_size=20),
)
def test_no_byte_is_carried_twice_or_sooner_than_the_bandwidth_allows(order: str, transfers: list[Any]) -> None:
    found, sent, start = wire(order, 4096), 0.0, float("inf")
    for lane, nbytes, later, late in transfers:
        found.advance(found.now + later)
        if found.lanes[lane].left > 0:
            continue  # a lane carries one transfer at a time
        start = min(start, max(0.0, found.now - late))
        found.add(lane, nbytes, late)
        sent += nbytes
    for lane in range(4):
        if found.lanes[lane].left > 0:
            finish(found, lane)
    assert not sent or found.now - start + 1e-6 >= sent / 1e6


def rates(clock: OwnClock, senders: Sequence[tuple[Port, LaneName]], count: int) -> list[float]:
    """Bytes/s of each sender, a thread of its own, while all of them send."""
    found = list[float]()

    def send(port: Port, lane: LaneName) -> None:
        found.append(chain(port, lane, count))
        clock.over()

    threads = [threading.Thread(target=send, args=sender) for sender in senders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("bandwidth", [1e8, 1e9])
def test_a_port_has_its_bandwidth_alone_and_shared(bandwidth: float) -> None:
    for lanes in (LANES[:1], LANES):
        clock = OwnClock(len(lanes))
        port = Port(LinkEmulation(bandwidth=bandwidth), clock=clock.host)
        found = rates(clock, [(port, lane) for lane in lanes], 100)
        assert found == pytest.approx([bandwidth / len(lanes)] * len(lanes), rel=0.01)


def test_ports_of_one_file_share_its_bandwidth(tmp_path: Path) -> None:
    clock, link = OwnClock(2), LinkEmulation(bandwidth=1e8)
    ports = [Port(link, tmp_path / "port", rank, clock.host) for rank in (0, 1)]
    assert rates(clock, [(port, "copy") for port in ports], 20) == pytest.approx([5e7, 5e7], rel=0.03)


def one_of_two(file: Path, rank: int, barrier: Any, report: Any) -> None:
    port = Port(LinkEmulation(bandwidth=1e8), file, rank)
    barrier.wait()
    begun = port.clock.now()
    report.put((begun, begun + 20 * MIB / chain(port, "copy", 20)))


def test_ranks_share_the_port_of_a_root_complex(tmp_path: Path) -> None:
    context = forking()
    report, barrier = context.Queue(), context.Barrier(2)
    ranks = [context.Process(target=one_of_two, args=(tmp_path / "port", r, barrier, report)) for r in (0, 1)]
    for rank in ranks:
        rank.start()
    begun, over = zip(*(report.get(timeout=300) for _ in ranks), strict=True)
    for rank in ranks:
        rank.join()
    assert 40 * MIB / (max(over) - min(begun)) <= 1.01e8, "both together, while nothing is known of when each sends"


@pytest.mark.parametrize("debug", [(), ("threads",)])
def test_copies_of_a_program_take_as_long_as_the_link_says(debug: tuple[str, ...], tmp_path: Path) -> None:
    clock, link = OwnClock(), LinkEmulation(bandwidth=2e5)
    (tmp_path / "machine.json").write_text(replace(load_profile(OPTIONS["hardware"]), link_emulation=link).to_json())
    kind, port = ThreadsDevice if debug else CpuDevice, Port(link, clock=clock.host)
    arena = Arena(make=lambda *_: kind(port=port, clock=clock.host))
    options = {**OPTIONS, "hardware": str(tmp_path / "machine.json"), "lowering": "eager", "debug": debug}
    torch.manual_seed(0)
    model = Stack(4).eval()
    inputs = [torch.randn(4, 8) for _ in range(8)]
    with torch.no_grad():
        want = [model(x) for x in inputs]
        run = torch.compile(model, backend="chunkflow", fullgraph=True, options={**options, "arena": arena})
        ended = list[float]()
        for x, right in zip(inputs, want, strict=True):
            assert torch.equal(run(x), right)
            arena.streams.copy.synchronize()
            ended.append(clock.now())
    (session,) = programs(model)
    steps, due = session.measurements[1:], session.plan.moved_bytes / 2e5
    assert all(step.moved_bytes == session.plan.moved_bytes > 0 for step in steps)
    assert [after - before for before, after in pairwise(ended)] == pytest.approx([due] * len(steps), rel=1e-3)
    assert sum(step.copy_s for step in steps) == pytest.approx(due * len(steps), rel=0.2), "the last ones are not over"
    assert all(0 < step.step_s <= due * 1.001 for step in steps), "nothing else takes time here"


def test_an_invalid_link_is_refused() -> None:
    text = replace(load_profile("cpu"), link_emulation=LinkEmulation(bandwidth=1e8)).to_json()
    assert Hardware.from_json(text).link_emulation == LinkEmulation(bandwidth=1e8)
    for old, new, said in (
        ("100000000.0", "1", "link_emulation.bandwidth=1 is outside"),
        ('"fair"', '"lifo"', "must be fair or fifo, not 'lifo'"),
        ('"quantum"', '"quantums"', "link_emulation is not valid.*quantums"),
    ):
        with pytest.raises(ChunkflowError, match=said):
            Hardware.from_json(text.replace(old, new))
