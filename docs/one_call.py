"""The values between the stages of one call, as docs/architecture.md shows them.  ``--write`` writes them there.

The model has two blocks of two weights, with an exchange between them.  It runs as one of two ranks, on a process group that
does nothing, so its outputs mean nothing.
"""

from __future__ import annotations

import argparse
import re
import textwrap
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import chunkflow_compile
from chunkflow_compile.passes.program.verify import verify
from chunkflow_compile.passes.step import Run, Start, Step

PAGE = Path(__file__).with_name("architecture.md")
BLOCK = re.compile(r"(^## One call, with the value of every field$.*?^```$\n).*?(^```$)", re.MULTILINE | re.DOTALL)
OPTIONS: dict[str, Any] = {"weight_memory": "20KiB", "hardware": "h100-pcie-x2", "min_bytes": 0, "chunk_bytes": 4096}
WIDTH = 125
_SPACE = "\0"  # within a field, where no line is broken


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        exchanged = funcol.all_to_all_single(self.up(x), None, None, dist.group.WORLD)
        return x + self.down(torch.relu(exchanged))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run() -> Any:
    """The program of the model, after a cold call and a warm one."""
    model = Model().eval()
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        with torch.no_grad():
            call = torch.compile(model, backend="chunkflow", fullgraph=True, options={**OPTIONS, "lowering": "eager"})
            for _ in range(2):
                call(torch.randn(4, 32))
        (solo,) = chunkflow_compile.programs(model)
        return solo
    finally:
        dist.destroy_process_group()


def line(value: Any, depth: int = 0, **instead: str) -> str:
    """A dataclass or a named tuple with its fields, broken between them; ``instead``: what is shown of some of them."""
    names = [field.name for field in fields(value)] if is_dataclass(value) else value._fields
    parts = {**{name: _text(getattr(value, name)) for name in names}, **instead}
    text = f"{type(value).__name__}({', '.join(f'{n}={p}'.replace(' ', _SPACE) for n, p in parts.items())})"
    at, under = depth * "  ", depth * "  " + "    "
    return textwrap.fill(text, WIDTH, initial_indent=at, subsequent_indent=under).replace(_SPACE, " ")


def _text(value: Any) -> str:
    """Of values that have fields of their own, how many they are."""
    many = isinstance(value, tuple) and any(is_dataclass(v) or isinstance(v, tuple) for v in value)
    return f"<{len(value)}>" if many else repr(value)


def shown() -> str:
    """What flows between the stages: of several of a kind, the second region, its collective and its weight."""
    solo = run()
    problem, plan, step = solo.program.problem, solo.plan, solo.measurements[-1]
    region = problem.regions[1]
    # what differs from run to run
    times = {name: "..." for name in step._fields if name.endswith("_s") or name in ("alone_bytes", "windows")}
    lines = [
        f"options {OPTIONS}",
        line(problem),
        line(region, 1, cost="..."),
        line(region.cost, 2),
        line(problem.collectives[0], 1),
        line(problem.weights[1], 1),
        line(plan, predicted="..."),
        line(plan.weights[1], 1),
        line(plan.predicted, 1),
        line(plan.predicted.spans[1], 2),
        "Step, the ops of this region:",
        *(f"  {op!r}" for op in _ops_of_region(solo.program.ops)),
        "Program, the lines of this region:",
        *(f"  {text}" for text in _of_region(str(solo.program))),
        line(verify(solo.program)),
        line(step, **times),
    ]
    return "\n".join(lines)


def _of_region(program: str) -> list[str]:
    """The lines of a program from the collective before the second region to its last evict."""
    lines = program.splitlines()
    first = next(i for i, text in enumerate(lines) if text.startswith("all_to_all_single:"))
    last = next(i for i, text in enumerate(lines) if text == "evict('blocks.0.down.weight')")
    return lines[first : last + 1]


def _ops_of_region(step: Step) -> Step:
    """The ops from the collective before the second region to the region."""
    return step[step.index(Start(0)) : step.index(Run(1)) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"write it to {PAGE.name}")
    text = shown()
    if not parser.parse_args().write:
        print(text)
        return
    PAGE.write_text(BLOCK.sub(lambda found: f"{found[1]}{text}\n{found[2]}", PAGE.read_text(), count=1))


if __name__ == "__main__":
    main()
