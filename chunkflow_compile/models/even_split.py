"""Ulysses splits a sequence into equal parts: what it cannot split is refused with both numbers, before Dynamo hides them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from torch._dynamo.comptime import comptime

from chunkflow_compile.passes.errors import ChunkflowError


class UnevenError(ChunkflowError, AssertionError):
    """A sequence that cannot be split.  diffusers raises an AssertionError here, and Dynamo lets one through as it is."""


class EvenSplitHook(ContextParallelSplitHook):  # type: ignore[misc]  # diffusers has no types
    """diffusers' hook, which splits the arguments or the outputs of a module over the ranks."""

    def _prepare_cp_input(self, x: torch.Tensor, cp_input: Any) -> torch.Tensor:
        if cp_input.expected_dims is None or x.dim() == cp_input.expected_dims:
            _refuse_uneven(x, cp_input.split_dim, self.parallel_config._flattened_mesh.size())
        part: torch.Tensor = super()._prepare_cp_input(x, cp_input)
        return part


def _refuse_uneven(x: torch.Tensor, dim: int, degree: int) -> None:
    """Raise UnevenError if the dimension ``dim`` cannot be split into ``degree`` equal parts."""
    if torch.compiler.is_dynamo_compiling():
        comptime(_while_traced)  # an error that is raised by traced code becomes one of Dynamo's
    else:
        _refuse_size(x.shape, dim, degree)


def _while_traced(context: Any) -> None:
    dim, degree = map(_fixed_int, (context.get_local("dim"), context.get_local("degree")))
    _refuse_size(context.get_local("x").as_fake().shape, dim, degree)


def _fixed_int(number: Any) -> int:
    """An int of traced code.  With dynamic=True it may be a symbol, which the split itself is going to fix."""
    return int(number.as_python_constant() if number.is_python_constant() else number.as_fake())


def _refuse_size(shape: torch.Size, dim: int, degree: int) -> None:
    if shape[dim] % degree == 0:
        return
    tokens = int(shape[dim])
    sizes = [size for size in (tokens // degree * degree, (tokens // degree + 1) * degree) if size]
    raise UnevenError(
        f"Ulysses over {degree} ranks splits a sequence into {degree} equal parts, and {tokens} tokens cannot be split so "
        f"(a tensor of shape {tuple(map(int, shape))}): choose the height, the width, the frames or the length of the prompt "
        f"so that there are {' or '.join(map(str, sizes))}, or a degree that divides {tokens}."
    )
