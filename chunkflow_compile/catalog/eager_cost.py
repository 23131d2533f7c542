"""Count the cost of an eager call (FLOPs, memory traffic, and peak activation memory) without computing values."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import DEFAULT_MIN_BYTES

from .weightless import Build, default_dtype


@dataclass(frozen=True, kw_only=True)
class EagerCost:
    """The cost of one call.

    ``weights``: the bytes of all weights.  ``small``: the bytes of the weights that are smaller than the default
    ``min_bytes``, which stay on the device.  ``activations``: the peak bytes of all other live tensors, including inputs.
    A compiled call needs fewer bytes, because ops are fused.  Workspaces of kernels are not counted.  ``flops``: the
    number of floating-point operations.  ``traffic``: the bytes that ops read and write.  ``passes``: the number of calls
    of the largest submodule.  A VAE that decodes chunks of frames, one after the other, calls its decoder once per chunk.
    """

    weights: int
    small: int
    activations: int
    flops: int
    traffic: int
    passes: int = 1

    def seconds(self, hardware: Hardware) -> float:
        """Return the predicted seconds of a call: the time of matrix products plus the time of memory traffic, without
        overlap."""
        return self.flops / hardware.flops("bfloat16") + self.traffic / hardware.memory_rate


def eager_cost(build: Build, dtype: torch.dtype, method: str = "__call__") -> EagerCost:
    """Compute the cost of a call without weights.  ``build``: a function that returns a model and the keyword arguments
    of its ``method``."""
    with FakeTensorMode(allow_non_fake_inputs=True), default_dtype(dtype), torch.no_grad():
        model, inputs = build()
        call = getattr(model.eval(), method)
        weights = {t.untyped_storage()._cdata: t.nbytes for t in (*model.parameters(), *model.buffers())}
        live, counter = _LiveBytes(set(weights)), FlopCounterMode(display=False)
        calls = Counter[nn.Module]()
        for part in model.children():
            part.register_forward_hook(lambda part, *_: calls.update([part]))
        with counter, live:
            call(**inputs)
        passes = max(((_bytes(part), count) for part, count in calls.items()), default=(0, 1))[1]
    return EagerCost(
        weights=sum(weights.values()),
        small=sum(nbytes for nbytes in weights.values() if nbytes < DEFAULT_MIN_BYTES),
        activations=live.most,
        flops=counter.get_total_flops(),
        traffic=live.traffic,
        passes=passes,
    )


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


class _LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that ops create and that are still referenced."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()
        self._counted = weights  # the storages that are counted already, and the storages of weights
        self._now = self.most = self.traffic = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        for tensor in inputs:
            self._add(tensor)
        outputs = func(*args, **(kwargs or {}))
        fresh = [t for t in tree_leaves(outputs) if isinstance(t, torch.Tensor) and self._add(t)]
        if fresh:  # a view has no new storage, and moves no data
            self.traffic += sum(t.nbytes for t in (*inputs, *fresh))
        return outputs

    def _add(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._counted:
            return False
        self._counted.add(key)
        self._now += nbytes
        self.most = max(self.most, self._now)
        weakref.finalize(storage, self._drop, key, nbytes)
        return True

    def _drop(self, key: int, nbytes: int) -> None:
        self._counted.discard(key)
        self._now -= nbytes
