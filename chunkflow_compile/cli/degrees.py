"""``chunkflow simulate --sweep-ulysses``: predicts step time and memory by Ulysses degree, and recommends a degree."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.report.record import fitted, prose
from chunkflow_compile.units import size
from chunkflow_compile.weights.progress import Progress

from .output import say, write_json
from .planned_machine import choose_hardware, note_hardware
from .planning_arguments import load_and_plan

# A higher degree is recommended only if the throughput per rank is at least this share of the throughput at the lowest
# degree.
ENOUGH = 0.7


@dataclass(frozen=True, kw_only=True)
class Degree:
    """A step at a Ulysses degree.  ``collective_s``: the seconds of the step in which compute waits for collectives.
    ``device_bytes``: the bytes of weights on the device of each rank.  ``host_bytes``: the bytes of weights in host
    memory; the ranks of a NUMA node share one copy."""

    degree: int
    step_s: float
    collective_s: float
    device_bytes: int
    host_bytes: int

    def share(self, base: Degree) -> float:
        """Return the throughput per rank relative to the throughput per rank at the degree of ``base``."""
        return base.step_s * base.degree / (self.step_s * self.degree)


def sweep(arguments: argparse.Namespace) -> int:
    """Plan for each degree, and print the recommendation and the table."""
    numbers = _degrees(arguments.sweep_ulysses)
    if arguments.ulysses != 1 or arguments.policy != "all":
        raise ChunkflowError(
            "--sweep-ulysses plans policy chunkflow at its own degrees: leave out --ulysses and --policy."
        )
    choose_hardware(arguments)
    note_hardware(arguments)
    progress = Progress(2 * len(numbers))
    degrees, work = list[Degree](), dict[int, int]()
    for degree in reversed(numbers):  # the highest degree first, because it may not divide the heads
        # with fewer ranks than nodes, as at degree 1, each rank is on its own node
        nodes, peers = min(degree, arguments.nodes), arguments.peers if degree > 1 else "no"  # one rank has no peers
        given = argparse.Namespace(**{**vars(arguments), "ulysses": degree, "nodes": nodes, "peers": peers})
        target, plan = load_and_plan(given, progress)
        assert plan.predicted is not None
        work[degree] = sum(region.cost.flops for region in target.problem.regions)
        degrees.append(
            Degree(
                degree=degree,
                step_s=plan.predicted.step_s * target.forwards,
                collective_s=plan.predicted.collective_s * target.forwards,
                device_bytes=plan.device_bytes,
                host_bytes=target.problem.total_bytes,
            )
        )
    degrees.reverse()
    _note_undivided(arguments.model, work)
    sentence = recommended(degrees)
    say(arguments, prose(sentence))
    say(arguments, "\n" + prose(f"{target.title}, simulated on {target.hardware.name}, {target.calls}") + "\n")
    rows = [
        (
            d.degree,
            f"{d.step_s:.3f} s",
            f"{degrees[0].step_s / d.step_s:.2f}",
            f"{100 * d.share(degrees[0]):.0f} %",
            f"{100 * d.collective_s / d.step_s:.0f} %",
            size(d.device_bytes),
            size(d.host_bytes),
        )
        for d in degrees
    ]
    headers = ("degree", "step", "speedup", "work per rank", "in collectives", "weights on each GPU", "host memory")
    say(arguments, fitted(rows, headers))
    write_json(arguments, {"model": target.title, "degrees": [asdict(d) for d in degrees], "recommended": sentence})
    return 0


def recommended(degrees: Sequence[Degree]) -> str:
    """Return a sentence that recommends the fastest degree whose :meth:`Degree.share` is at least ``ENOUGH``.  It also
    describes the fastest degree of all."""
    base = degrees[0]
    best = min((d for d in degrees if d.share(base) >= ENOUGH), key=lambda d: d.step_s)
    fastest = min(degrees, key=lambda d: d.step_s)
    if fastest.degree == best.degree:
        share = f"each rank does {_share(best, base)} of what it does at degree {base.degree}"
        return f"Take degree {best.degree}: it has the shortest step, and {share}."
    times = f"{base.step_s / fastest.step_s:.2f} times as fast as degree {base.degree}"
    return (
        f"Take degree {best.degree}: degree {fastest.degree} has the shortest step, {times}, but each of its ranks does "
        f"{_share(fastest, base)} of what it does at degree {base.degree}."
    )


def _share(degree: Degree, base: Degree) -> str:
    return f"{100 * degree.share(base):.0f} %"


def _note_undivided(model: str, work: Mapping[int, int]) -> None:
    """Print a note on stderr if a rank computes at least as many FLOPs at the highest degree as at the lowest degree.  In
    this case, the user's function returns inputs of the same size at each degree, so the steps do not solve the same
    problem."""
    low, high = min(work), max(work)
    if low < high and work[high] >= work[low]:
        print(
            f"note: each rank computes as much at degree {high} as at degree {low}, so these steps are not of one problem: "
            f"let {model} divide its tokens by torch.distributed.get_world_size()",
            file=sys.stderr,
        )


def _degrees(text: str) -> list[int]:
    """Parse a list of degrees and sort it in ascending order.  Raises ChunkflowError if it is not a list of degrees."""
    try:
        numbers = sorted({int(part) for part in text.split(",")})
    except ValueError:
        numbers = []
    if not numbers or numbers[0] < 1:
        raise ChunkflowError(f"--sweep-ulysses {text}: give degrees, such as 1,2,4,8.")
    return numbers
