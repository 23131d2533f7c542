"""Calls as CUDA graphs: equal numbers, few calls of the runtime, and each kind of event is needed."""

from __future__ import annotations

import torch

from chunkflow_compile import programs

from . import control
from .test_findings import placed


def test_steps_are_equal() -> None:
    model, run, twin = placed(6, width=256, cudagraphs=True)
    got = []
    for _ in range(20):
        x = torch.randn(16, 8, device="cuda")
        with control.counted() as calls:
            got.append((run(x), twin, x))
    torch.cuda.synchronize()
    print(programs(model)[0].call.captures, calls)
    assert all(torch.equal(y, twin(x)) for y, twin, x in got)
    assert programs(model)[0].call.captures.launches > 10
