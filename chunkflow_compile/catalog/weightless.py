"""Trace models without weights, with fake tensors, and for any number of ranks in one process."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from chunkflow_compile.frontend.trace import trace
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.graph.traced import Traced
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES

from .branches import exchange_branches
from .ulysses import enable_ulysses

Build = Callable[[], tuple[nn.Module, Mapping[str, Any]]]


def trace_without_weights(
    build: Build,
    degree: int = 1,
    min_bytes: int = DEFAULT_MIN_BYTES,
    dtype: torch.dtype = torch.float32,
    cfg_parallel: int = 1,
) -> Traced:
    """Trace one call on one rank.  ``build``: a function that returns the model and the keyword arguments of the call.

    ``degree``: the number of ranks per branch of classifier-free guidance.  ``cfg_parallel``: the number of branches; if
    there are two, the predictions are exchanged at the end of the call.  ``build`` runs with fake tensors, in a fake
    process group of all ranks.  A model with ``enable_parallelism`` is split over the first ``degree`` ranks.  ``dtype``:
    the dtype of the parameters.  Raises ChunkflowError if there is a process group already, or if a collective of the
    model spans both branches.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_ranks(degree * cfg_parallel), torch.no_grad():
        with fake, default_dtype(dtype):  # fake parameters cannot be converted to another dtype afterwards
            model, inputs = build()
        if degree > 1 and hasattr(model, "enable_parallelism"):
            enable_ulysses(model, degree)  # not in the fake mode, because a device mesh reads real tensors
        pair = None
        if cfg_parallel > 1:
            pair = dist.new_group([branch * degree for branch in range(cfg_parallel)])
            exchange_branches(model, pair)
        with fake:
            traced = trace(model, inputs, min_bytes)
        if pair is not None:
            most = max((ranks for name, ranks in traced.ranks.items() if name != pair.group_name), default=0)
            if most > degree:
                raise ChunkflowError(
                    f"The model has collectives of {most} ranks, but a branch of classifier-free guidance has {degree}: "
                    f"they would mix the branches. Give them a process group of {degree} ranks, from rank 0 on."
                )
        return traced


def load_build(name: str) -> Build:
    """Return the function named by ``file.py:function``.  Raises ChunkflowError if there is no such file or function."""
    path, _, function = name.rpartition(":")
    if Path(name).is_file():
        raise ChunkflowError(f"{name} is a file: name the function in it that returns the model, as {name}:function.")
    if not path or not Path(path).is_file():
        raise ChunkflowError(f"There is no file {path or name!r}: write the model as file.py:function.")
    spec = importlib.util.spec_from_file_location(f"chunkflow_model_{Path(path).stem}", path)
    if spec is None or spec.loader is None:
        raise ChunkflowError(f"{path} is not a Python file: write the model as file.py:function.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look up the module by name
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ChunkflowError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    build = getattr(module, function, None)
    if not callable(build):
        raise ChunkflowError(f"{path} has no function {function!r}. Name one that returns (model, keyword arguments).")

    def checked() -> tuple[nn.Module, Mapping[str, Any]]:
        built = build()
        pair = isinstance(built, tuple) and len(built) == 2
        if not pair or not isinstance(built[0], nn.Module) or not isinstance(built[1], Mapping):
            raise ChunkflowError(f"{name} returned {type(built).__name__}: it must return (model, keyword arguments).")
        return built[0].eval(), built[1]

    return checked


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Return a context in which parameters are created in ``dtype``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _fake_ranks(degree: int) -> Iterator[None]:
    """Return a context with a fake process group of ``degree`` ranks, which transfers nothing.  It is only for
    tracing."""
    if degree == 1 and dist.is_initialized():
        yield
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise ChunkflowError("There is a process group already. Trace models without weights in a separate process.")
    dist.init_process_group("fake", rank=0, world_size=degree, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
