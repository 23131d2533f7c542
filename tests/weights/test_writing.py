"""Writes to weights that ranks share: inside ``writing`` and beside it, and what was handed out before."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from test_shared_memory import LEAST, SIZE, large, shared

from chunkflow_compile import offload, writing
from chunkflow_compile.models.small import small_model

NAME = "blocks.0.ffn.net.0.proj.weight"


def state_from_inside(rank: int) -> None:
    model = small_model("wan", SIZE)
    offload(model, min_bytes=LEAST, share=True)
    with writing(model):
        model.get_parameter(NAME).fill_(0.5)
        state = model.state_dict()
    assert shared(model) == large(model)
    assert bool((state[NAME] == 0.5).all())
    dist.barrier()
    if rank == 0:
        state[NAME].zero_()
    dist.barrier()
    assert bool((model.get_parameter(NAME) == 0.5).all()), "no rank writes the memory of all"


def test_a_state_dict_from_inside_writing_is_a_copy(on_ranks: Callable[..., None]) -> None:
    on_ranks(state_from_inside)
