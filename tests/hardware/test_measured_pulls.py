"""What calibrate measures of pulls: the arithmetic, on a clock of its own; and two ranks that pull, or cannot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from chunkflow_compile.cli.main import main
from chunkflow_compile.hardware import contention, pulls, rank_figures, stopwatch
from chunkflow_compile.hardware.profiles import load_profile
from chunkflow_compile.hardware.pulls import Pulls, chunks_of, pull_figures, puller, pulls_of
from chunkflow_compile.passes.hardware import Hardware, LinkEmulation
from chunkflow_compile.passes.pieces import piece_bytes
from chunkflow_compile.weights.peer_pieces import Pieces
from chunkflow_compile.weights.peers import Peers

CPU = torch.device("cpu")
MIB = 1 << 20
MACHINE = replace(
    load_profile("cpu"), memory_bandwidth=50e9, eta_memory=1.0, chunk_s=1e-5, h2d_bandwidth=5e9, peer_bandwidth=20e9
)
FIELDS = ("peer_bandwidth", "pull_slowdown", "collective_pull_slowdown", "compute_pull_slowdown")
MEASURED = {field: getattr(MACHINE, field) for field in Hardware.__dataclass_fields__ if field not in ("name", *FIELDS)}


class WorkTime(threading.local):
    """A clock for each thread: time passes by what is done only.  Work takes longer while another thread works.

    ``known``: the threads that do not count, of the test and of those before it.
    """

    seconds = 0.0

    def __init__(self, known: set[threading.Thread]) -> None:
        self.known = known

    def perf_counter(self) -> float:
        return self.seconds

    monotonic = perf_counter

    def taking(self, seconds: float, beside: float) -> None:
        """``beside``: the factor by which it takes longer then."""
        self.seconds += seconds * (beside if {*threading.enumerate()} - self.known else 1)


def on_work_time(patch: pytest.MonkeyPatch, slower: float = 1.0) -> WorkTime:
    """Pulls take what the model says on MACHINE, times ``slower``, and three times that beside other work; an MLP takes
    10 ms, and 12.5 beside pulls."""
    time = WorkTime({*threading.enumerate()})

    def timed(device: torch.device, chunks: list[Pieces], *port: Any) -> Callable[[], object]:
        left = [*chunks]

        def pull() -> None:
            chunk = left.pop(0)
            left.append(chunk)
            took = MACHINE.pull_seconds(chunk.numel(), chunk.from_others, 1)
            time.taking(slower * took, 3.0)

        return pull

    for module in (stopwatch, contention):
        patch.setattr(module, "time", time)
    patch.setattr(pulls, "puller", timed)
    patch.setattr(contention, "TURNS", 3)
    patch.setattr(contention.F, "layer_norm", lambda x, *_: (time.taking(10e-3, 1.25), x)[1])
    return time


def pieces_of(ranks: int, nbytes: int) -> Pieces:
    held = [torch.full((piece_bytes(nbytes, ranks),), rank, dtype=torch.uint8) for rank in range(ranks)]
    return Pieces(held, 0, nbytes, 0, 0, nbytes)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_rate_is_the_one_with_which_a_chunk_takes_what_it_took(
    ranks: int, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the factors are those by which each takes longer beside the other."""
    time = on_work_time(monkeypatch)
    found = pulls_of(CPU, pieces_of(ranks, 48 * MIB), exchange=lambda: time.taking(2e-3, 1.5))
    rate = found.rate(MACHINE.memory_rate, MACHINE.chunk_s)
    assert rate == pytest.approx(MACHINE.peer_bandwidth, rel=1e-6)
    assert found.exchange_slowdowns == pytest.approx((3.0, 1.5), rel=1e-2) and found.compute_slowdown == 1.25
    figures = {field: value for field, value, _ in pull_figures(found, MACHINE, ranks)}
    assert figures == dict(zip(FIELDS, (rate, round(found.exchange_slowdowns[0], 2), 1.5, 1.25), strict=True))
    assert replace(MACHINE, **figures).why_no_peers(ranks) == ""


def test_a_pull_is_that_of_the_runtime() -> None:
    """The chunks of a weight in turn, whole, from the piece of each rank."""
    pieces = pieces_of(2, 20 * MIB)
    chunks = chunks_of(pieces)
    assert [chunk.numel() for chunk in chunks] == [16 * MIB, 4 * MIB]
    taken = list[torch.Tensor]()

    def seen(target: torch.Tensor, chunk: Pieces) -> None:
        chunk_of_ranks(target, chunk)
        taken.append(target)

    chunk_of_ranks = pulls.take
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "take", seen)
        pull = puller(CPU, chunks)
        for _ in range(3):
            pull()
    assert [t.numel() for t in taken] == [16 * MIB, 4 * MIB, 16 * MIB] and taken[0] is taken[2]
    assert [int(t.sum()) for t in taken[:2]] == [8 * MIB, 2 * MIB], "half of each is the other rank's ones"


PULLED = Pulls(
    seconds=1e-3, nbytes=16 * MIB, from_others=8 * MIB, exchange_slowdowns=(1.5, 1.25), compute_slowdown=1.01
)


def test_pulls_that_take_no_longer_than_writing_memory() -> None:
    """Noise: without it the rate would have no bound."""
    assert replace(PULLED, seconds=1e-6).rate(MACHINE.memory_rate, MACHINE.chunk_s) == round(MACHINE.memory_rate)


@pytest.mark.parametrize(
    ("found", "values", "said"),
    [
        (PULLED, (12818, 1.5, 1.25, 1.0), "2 ranks that pull chunks of 16.0 MiB at once"),
        (replace(PULLED, exchange_slowdowns=None, compute_slowdown=1.1), (12818, 2.0, 2.0, 1.1), "2 ranks"),
        (
            replace(PULLED, seconds=4e-3),
            (0, 1.5, 1.25, 1.0),
            "0, because on cpu a rank pulls 2.295 GB/s from the others, and copies 5 GB/s from host memory.",
        ),
        ("0: there is no NVLink", (0, 2.0, 2.0, 1.0), "0: there is no NVLink"),
    ],
)
def test_figures_of_a_profile(found: Pulls | str, values: tuple[float, ...], said: str) -> None:
    figures = [*pull_figures(found, replace(MACHINE, eta_pref=1.0), 2)]
    assert [field for field, *_ in figures] == [*FIELDS]
    assert tuple(round(value / 1e6) if value > 100 else value for _, value, _ in figures) == values
    assert figures[0][2].startswith(said)
    for _, _, how in figures[1:]:
        assert how.startswith("not measured, no pulls") == isinstance(found, str)
    assert ("a fair share" in figures[1][2]) == (isinstance(found, Pulls) and found.exchange_slowdowns is None)


@pytest.mark.parametrize(
    ("rate", "how", "said"),
    [
        (20e9, "measured", "pulls from all other ranks     20 GB/s"),
        (0.0, "0: no NVLink", "no pulls from other ranks: no NVLink"),
        (0.0, "not measured, one rank only", None),
    ],
)
def test_the_command_says_what_pulls_take_or_why_there_are_none(
    rate: float,
    how: str,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    profile = replace(MACHINE, peer_bandwidth=rate, sources={"peer_bandwidth": how})
    monkeypatch.setattr("chunkflow_compile.cli.calibrate.calibrate", lambda *_: profile)
    assert main(["calibrate", "--device", "cpu", "--out", str(tmp_path / "hw.json")]) == 0
    shown = capsys.readouterr().out
    assert ("pulls from" in shown) == (said is not None) and (said or "") in shown


def pulls_on_work_time(rank: int, *args: Any) -> None:
    """The second rank takes twice as long as the first."""
    pulls._WEIGHT, pulls.EXCHANGES = 32 * MIB, 3
    with pytest.MonkeyPatch.context() as patch:
        time, make = on_work_time(patch, 1.0 + rank), pulls.all_to_all

        def timed(*given: Any) -> Callable[[], None]:
            exchange = make(*given)

            def run() -> None:
                exchange()
                time.taking(2e-3, 1.5)

            return run

        patch.setattr(pulls, "all_to_all", timed)
        pulls.measure_pulls(rank, *args)


def without_room(rank: int, *args: Any) -> None:
    def full(self: Peers, nbytes: int) -> Any:
        raise OSError(12, "Cannot allocate memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pulls, "_WEIGHT", MIB)
        if rank:
            patch.setattr(Peers, "_allocated", full)
        pulls.measure_pulls(rank, *args)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, forked: None) -> Iterator[Callable[..., dict[str, Any]]]:
    """Field -> value and source, of two ranks that measure by ``work``."""

    def of(work: Callable[..., None]) -> dict[str, Any]:
        monkeypatch.setattr(rank_figures, "measure_pulls", work)
        return {
            field: (value, how) for field, value, how in rank_figures.joint_pull_figures(CPU, None, 2, True, MEASURED)
        }

    yield of


@pytest.mark.long
def test_two_ranks_pull_from_each_other(measured: Callable[..., dict[str, Any]]) -> None:
    figures = measured(pulls_on_work_time)
    model = 16 * MIB / MACHINE.memory_rate + MACHINE.chunk_s
    took = 2 * MACHINE.pull_seconds(16 * MIB, 8 * MIB, 1)
    assert figures["peer_bandwidth"][0] == pytest.approx(8 * MIB / (took - model), rel=1e-6), "at the slower"
    assert figures["pull_slowdown"][0] == 3.0 and figures["compute_pull_slowdown"][0] == 1.25
    assert figures["collective_pull_slowdown"][0] == 1.5


@pytest.mark.long
def test_ranks_that_cannot_pull_say_why(measured: Callable[..., dict[str, Any]]) -> None:
    value, how = measured(without_room)["peer_bandwidth"]
    assert value == 0 and how.startswith("0: ") and "rank 1 failed: A piece of 1 weights" in how


def test_an_emulated_link_for_all_has_no_pulls() -> None:
    (_, rate, how), *_ = rank_figures.joint_pull_figures(CPU, LinkEmulation(bandwidth=1e8), 2, True, MEASURED)
    assert rate == 0 and how == "0: pulls take the emulated link of copies from host memory"
