"""The race tests, on other random programs, for as long as asked: ``make soak`` for ten minutes.

    python tests/soak.py [--minutes 10] [--seed N]

Prints the seed of every round.  A round that fails ends the run with the program shrunk to its smallest, and
``--seed N --minutes 0`` does that round again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections import Counter
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from mutations import MUTATIONS, caught, listed
from random_programs import Bench, Choices, Spec, anywhere, examples, specs
from schedules import goes_wrong, matches

from chunkflow_compile.passes import pieces
from chunkflow_compile.passes.program.verify import check, verify, verify_together

STEPS, MODELS = 3, 4


def round_of(seed: int) -> Counter[str]:
    """Counts of what one round ran.  Raises AssertionError if a number is wrong, or if verify and a schedule disagree."""
    count: Counter[str] = Counter()

    @examples(seed, MODELS)
    @given(specs, st.lists(anywhere, min_size=4, max_size=4), st.integers(0, 2**16), st.sampled_from(MUTATIONS))
    def play(spec: Spec, plans: list[Choices], number: int, mutation: object) -> None:
        found = Bench(spec, plans[0])
        made = [found.program(chosen) for chosen in plans]
        for program in made:
            verify(program)
            runs = matches(found, [(program, x) for x in found.inputs(STEPS)], number)
            count.update(programs=1, runs=runs)
        verify_together(*made)
        order = [random.Random(number + i).choice(made) for i in range(6)]
        count.update(runs=matches(found, list(zip(order, found.inputs(len(order)), strict=True)), number))
        broken = mutation(found.program(plans[0]), random.Random(number))  # type: ignore[operator]
        if broken is not None:
            broken.module.recompile()
            refused = bool(list(check(broken)))
            wrong = goes_wrong(found, [(broken, x) for x in found.inputs(STEPS)], number)
            count.update(caught(refused, wrong))

    play()
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="how long; a round is always ended (default 10)")
    parser.add_argument("--seed", type=int, help="of the first round (default: from the clock)")
    arguments = parser.parse_args()
    seed = int(time.time()) if arguments.seed is None else arguments.seed
    end, total = time.monotonic() + 60 * arguments.minutes, Counter[str]()
    torch.set_num_threads(1)
    small_stripes = mock.patch.object(pieces, "STRIPE", 1536)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), small_stripes:
        dist.init_process_group("gloo", init_method=f"file://{Path(folder) / 'meet'}", rank=0, world_size=1)
        while True:
            print(f"seed {seed}", end=" ", flush=True)
            total += round_of(seed)
            print(listed(total), flush=True)
            seed += 1
            if time.monotonic() >= end:
                break
        dist.destroy_process_group()
    print("0 mismatches")


if __name__ == "__main__":
    main()
