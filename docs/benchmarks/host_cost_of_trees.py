"""Compare the host time of the executor in two source trees.  Two processes, one per tree, issue the calls of
host_cost.py in turn.

Because the processes alternate after every call, other load on the machine slows both, and the median ratio of their
times hardly varies: if a tree is compared with itself, it is within 1 % of 1.  Each tree runs its own host_cost.py.

python docs/benchmarks/host_cost_of_trees.py TREE OTHER [--processes 3] [--rounds 6]
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tabulate import tabulate

# The code that a process runs.  For each line on stdin, it issues a call and prints the CPU seconds of its thread.
CALLS = """
import os, sys, time
answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
import host_cost
enqueue, issue_all = host_cost.Executor.enqueue, host_cost._issue
def timed(executor, inputs):
    sys.stdin.readline()
    begin = time.thread_time()
    step = enqueue(executor, inputs)
    print(time.thread_time() - begin, file=answers)
    return step
def repeated(program):
    host_cost.Executor.enqueue = timed
    print("ready", host_cost.FIRST_STEPS, host_cost.STEPS, file=answers)
    while True:
        issue_all(program)
host_cost._issue = repeated
sys.argv[1:] = ["--out", os.devnull]
host_cost.main()
"""


class Calls:
    """A process that issues calls with the code in ``tree``.  ``calls``: the number of calls per round.  ``first``: the
    number of calls at the start of a round in which ChunkFlow measures its steps."""

    def __init__(self, tree: Path) -> None:
        environment = {
            "PYTHONPATH": f"{tree}:{tree / 'docs/benchmarks'}",
            "OMP_NUM_THREADS": "1",
            "PATH": "/usr/bin:/bin",
        }
        self._process = subprocess.Popen(
            [sys.executable, "-c", CALLS],
            cwd=tree,
            env=environment,
            text=True,
            bufsize=1,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        _, first, calls = self._answer().split()
        self.first, self.calls = int(first), int(calls)

    def _answer(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def issue(self) -> float:
        """Issue the next call and return its CPU seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        return float(self._answer())

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", type=Path, nargs=2, metavar="TREE")
    parser.add_argument("--processes", type=int, default=3, help="pairs of processes")
    parser.add_argument("--rounds", type=int, default=6, help="how often each process builds an executor")
    arguments = parser.parse_args()
    trees = [tree.resolve() for tree in arguments.trees]
    order = random.Random(0)
    found: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
    for pair in range(arguments.processes):
        processes = [Calls(tree) for tree in trees]
        for call in range(arguments.rounds * processes[0].calls):
            number = call % processes[0].calls
            seconds = _in_any_order(processes, order)
            if number:  # the first call is left out, because it copies the resident weights
                found[number < processes[0].first].append(seconds)
        for process in processes:
            process.close()
        print(f"{pair + 1} of {arguments.processes} pairs of processes", file=sys.stderr)
    rows = [
        (name, *(f"{1e3 * statistics.median(s):.2f} ms" for s in zip(*pairs, strict=True)), f"{_ratio(pairs):.3f}")
        for name, pairs in (("with measurement", found[True]), ("without", found[False]))
    ]
    print(tabulate(rows, headers=("step", *(tree.name for tree in trees), "median ratio"), disable_numparse=True))


def _in_any_order(processes: Sequence[Calls], order: random.Random) -> tuple[float, float]:
    if order.random() < 0.5:
        first = processes[0].issue()
        return first, processes[1].issue()
    second = processes[1].issue()
    return processes[0].issue(), second


def _ratio(pairs: Sequence[tuple[float, float]]) -> float:
    """Return the median ratio of the second tree's time to the first tree's time."""
    return statistics.median(second / first for first, second in pairs)


if __name__ == "__main__":
    main()
