"""Adds adapter slots to layers.  A slot is memory of fixed size in a layer, into which the weights of a LoRA adapter are
copied.  It exists before any adapter is loaded.

PEFT and diffusers store the weights of loaded adapters in dictionaries of PEFT's layers.  If a layer has slots, these weights
stay in host memory.  Before a program runs, each layer copies its active adapters from the dictionaries into its slots.
Switching adapters therefore changes only the values in the slots, and nothing is recompiled.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.weights.host_weight import HostWeight

_log = logging.getLogger(__name__)

# The name of the class attribute in which :func:`attributes_like` stores the original class.
_PLAIN = "_chunkflow_plain"


class Sizes:
    """The size of each slot of a model, and the number of slots per layer.

    ``rank``: the maximum rank of an adapter.  ``count``: the maximum number of adapters that are active at the same time.
    """

    def __init__(self, rank: int, count: int) -> None:
        self.rank = rank
        self.count = count
        self._said: set[str] = set()

    def warn_once(self, text: str) -> None:
        """Log a warning about a recompilation, unless another layer of the model has already logged the same text."""
        if text not in self._said:
            self._said.add(text)
            _log.warning("%s", text)


class Slotted(nn.Module):
    """A base class that adds slots to a LoRA layer.  :func:`slotted` derives a class from this class and from PEFT's class
    for the layer.

    ``slots``: one flat tensor with all slots of the layer.  The planner treats it as a single weight.  For each slot, the
    tensor contains the matrices A [rank, in] and B [out, rank], one after the other.
    ``scale``: one float32 scale per slot, stored as an int32 with the same bits, because a cast of the model to another dtype
    changes only floating-point tensors.
    ``own``: whether the layer runs PEFT's own forward.  It is True if slots do not support the type of an active adapter.
    ``late``: True if the layer got slots only when an adapter was loaded, and not from :func:`enable_adapters`.
    """

    chunkflow_filled = ("slots",)
    """Names of the buffers that :meth:`fill` fills.  These buffers are offloaded like weights, even if they are small."""

    sizes: Sizes
    slots: Any
    scale: torch.Tensor
    base_layer: nn.Module
    own: bool
    late: bool
    slot_rank: int
    _held: tuple[tuple[Any, ...], ...]

    @property
    def chunkflow_aside(self) -> Sequence[nn.Module]:
        """Return the submodules with the weights of adapters if these weights must not be offloaded; otherwise an empty list.

        If the layer runs PEFT's own forward, its program reads the weights of adapters directly, so they may be offloaded
        like all other weights.
        """
        peft: Any = self
        return () if self.own else [getattr(peft, name) for name in peft.adapter_layer_names]

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute from the slots what PEFT's forward computes from the adapters, with the same ops in the same order and
        precision."""
        if self.own or kwargs:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc,no-any-return]
        if not torch.compiler.is_compiling():
            self.fill()
        result: torch.Tensor = self.base_layer(x, *args)
        dtype, scale = result.dtype, self.scale.view(torch.float32)
        x = x.to(self.slots.dtype)
        for slot in range(len(scale)):
            a, b = self._views(self.slots, slot)
            delta = F.linear(F.linear(x, a), b)
            # do not round the scale to the dtype of delta: in PEFT, the scale is a Python number, which torch does not round
            wide = delta if delta.dtype == torch.float64 else delta.float()
            result = result + (wide * scale[slot]).to(delta.dtype)
        return result.to(dtype)

    def _views(self, slots: Any, slot: int) -> tuple[Any, Any]:
        ins, outs, rank = self.in_features, self.out_features, self.slot_rank
        begin = slot * rank * (ins + outs)  # type: ignore[operator]
        middle = begin + rank * ins  # type: ignore[operator]
        a = slots[begin:middle].view(rank, ins)
        return a, slots[middle : middle + rank * outs].view(outs, rank)  # type: ignore[operator]

    def _active(self) -> Iterator[tuple[str, Any, Any, float]]:
        """Yield the name, the matrices A and B, and the scale of each active adapter."""
        peft: Any = self
        if peft._disable_adapters or peft.merged_adapters:
            return
        a, b = peft._modules["lora_A"]._modules, peft._modules["lora_B"]._modules
        for name in peft.active_adapters:
            if name in a and name in b and name in peft.scaling:  # another thread may be removing the adapter
                yield name, a[name]._parameters["weight"], b[name]._parameters["weight"], float(peft.scaling[name])

    def fill(self) -> None:
        """Copy the active adapters into the slots, unless the slots already contain them.

        The caller must not hold the lock of an arena.
        Raises ChunkflowError if an adapter has no values, if an adapter does not fit its slot, or if more adapters are active
        than there are slots.
        """
        peft: Any = self
        if self.own:
            return
        if peft._disable_adapters and peft.merged_adapters:  # in this case, PEFT's forward also calls unmerge()
            peft.unmerge()
        active = [*self._active()]
        held = tuple((*_state(a), *_state(b), scale) for _, a, b, scale in active)
        if held == self._held:
            return
        for name, a, b, _ in active:
            self._check(name, a, b)
        weight, count = self.slots, len(self.scale)
        if len(active) > count:
            raise ChunkflowError(
                f"{len(active)} adapters are active and there are {count} slots: call set_adapter() again."
            )
        placed = isinstance(weight, HostWeight)
        with (
            weight.buffer.write() if placed else contextlib.nullcontext(),
            torch.inference_mode(False),
            torch.no_grad(),
        ):
            host = weight.host if placed else weight
            before = [state[:-1] for state in self._held]
            for slot in range(count):
                now = held[slot][:-1] if slot < len(held) else None
                if now != (before[slot] if slot < len(before) else None):
                    self._write(host, slot, *(active[slot][1:3] if now else (None, None)))
            scales = [scale for *_, scale in active] + [0.0] * (count - len(active))
            self.scale.copy_(torch.tensor(scales, dtype=torch.float32).view(torch.int32))
            # keep the weights alive: if a weight were freed, a new one with the same id and memory would count as unchanged
            self._held, self._alive = held, [(a, b) for _, a, b, _ in active]

    def _check(self, name: str, a: Any, b: Any) -> None:
        if a.is_meta or b.is_meta:
            raise ChunkflowError(
                f"The adapter {name!r} has no values: it is loaded in part. Delete it and load it again."
            )
        rank = a.shape[0]
        if rank > self.slot_rank or a.shape != (rank, self.in_features) or b.shape != (self.out_features, rank):
            raise ChunkflowError(
                f"The adapter {name!r} has weights of shapes {list(a.shape)} and {list(b.shape)}, which do not fit a layer "
                f"of {self.in_features} inputs and {self.out_features} outputs with slots of rank {self.slot_rank}: load it "
                "by load_lora_adapter or load_lora_weights, which make room for its rank."
            )

    def _write(self, host: torch.Tensor, slot: int, a: Any, b: Any) -> None:
        """Copy an adapter into a slot and pad it with zeros up to the rank of the slot.  If ``a`` is None, fill the slot with
        zeros.

        The zeros overwrite the values that an earlier adapter has left in the slot.  An unused slot needs zeros although its
        scale is zero: the old values may be NaN, and NaN times zero is NaN.
        """
        into_a, into_b = self._views(host, slot)
        rank = 0 if a is None else a.shape[0]
        if a is not None:
            into_a[:rank].copy_(_values(a))
            into_b[:, :rank].copy_(_values(b))
        into_a[rank:].zero_()
        into_b[:, rank:].zero_()

    # Dynamo's guards check attributes of a layer, such as ``own``, in order to choose a compiled graph.  The methods below
    # set these attributes when adapters are loaded or activated, that is, before the guards of the next call run.

    def choose_forward(self) -> None:
        """Choose between PEFT's own forward and the forward with slots, depending on the active adapters.  If the active
        adapters do not fit the slots, replace the slots by larger ones."""
        peft: Any = self
        active = [name for name in peft.active_adapters if name in peft.lora_A]
        kinds = {name: _kind(peft, name) for name in active}
        own = any(kinds.values())
        if own:
            name, kind = next((n, k) for n, k in kinds.items() if k)
            self.sizes.warn_once(
                f"the adapter {name!r} is of a kind that slots do not hold ({kind}): its layers run PEFT's own forward and "
                "are compiled for it. A plain LoRA would not be."
            )
        if own != self.own:
            self.own = own
            for name in peft.lora_A:
                peft._move_adapter_to_device_of_base_layer(name)
        rank = max((layer.weight.shape[0] for layer in peft.lora_A.values()), default=0)
        if not own and (rank > self.slot_rank or len(active) > len(self.scale)):
            wanted = max(rank, self.slot_rank), max(len(active), len(self.scale))
            self.sizes.warn_once(
                f"{wanted[1]} adapters at once of rank {wanted[0]} need larger slots, with which the model is compiled "
                f"again: call enable_adapters(rank={wanted[0]}, slots={wanted[1]}) to have them from the first."
            )
            self.grow(*wanted, self.slots.dtype)

    def grow(self, rank: int, count: int, dtype: torch.dtype) -> None:
        """Replace the slots of the layer by ``count`` empty slots with the given rank and dtype."""
        peft: Any = self
        device = peft._get_base_layer_device_and_dtype(peft.get_base_layer())[0]
        with torch.inference_mode(False):
            elements = count * rank * (peft.in_features + peft.out_features)
            self.register_buffer("slots", torch.zeros(elements, dtype=dtype, device=device), persistent=False)
            self.register_buffer("scale", torch.zeros(count, dtype=torch.int32, device=device), persistent=False)
        self.slot_rank, self._held, self._alive = rank, (), []

    def mark_stale(self) -> None:
        """Make the next call of the layer fill the slots again.

        This is needed after a hotswap of adapters: PEFT overwrites the weights of an adapter in place without changing their
        version counters, so :meth:`fill` does not notice the new values.
        """
        self._held = ((),) * len(self.scale)

    def set_adapter(self, *args: Any, **kwargs: Any) -> None:
        super().set_adapter(*args, **kwargs)  # type: ignore[misc]
        self.choose_forward()

    def unmerge(self) -> None:
        if self.merged_adapters:  # PEFT's method warns for each layer without merged adapters
            super().unmerge()  # type: ignore[misc]

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        """Return the tensor that is added to the base weight when an adapter is merged, on the device of the base weight."""
        peft: Any = self
        delta: torch.Tensor = super().get_delta_weight(adapter)  # type: ignore[misc]
        return delta.to(peft._get_base_layer_device_and_dtype(peft.get_base_layer())[0])

    def _move_adapter_to_device_of_base_layer(self, adapter_name: str, device: torch.device | None = None) -> None:
        """Move an adapter to ``device``.

        If ``device`` is None, the adapter is moved to host memory, from which slots are filled.  But if the layer runs PEFT's
        own forward, the adapter is moved to the device of the base layer.
        """
        if device is None and not self.own:
            device = torch.device("cpu")
        super()._move_adapter_to_device_of_base_layer(adapter_name, device)  # type: ignore[misc]


def _values(weight: Any) -> torch.Tensor:
    """Return the values of an adapter's weight.

    If a program has run PEFT's own forward for the layer, the weight was offloaded, and its values are in the host store.
    """
    return weight.values_on_host if isinstance(weight, HostWeight) else weight


def _state(weight: Any) -> tuple[int, int, int]:
    """Return a value that changes whenever a weight is replaced, reallocated or overwritten.

    There is one exception: if an inference tensor is overwritten, the returned value stays the same, because inference
    tensors have no version counter.
    """
    values = _values(weight)
    return id(weight), values.data_ptr(), -1 if values.is_inference() else values._version


def _kind(layer: Any, name: str) -> str | None:
    """Return the name of an adapter's type, or None if the adapter is an ordinary LoRA."""
    if (variant := layer.lora_variant.get(name)) is not None:
        return type(variant).__name__.removesuffix("LinearVariant")
    return "lora_bias" if layer.lora_bias.get(name) else None


@cache
def slotted(cls: type) -> type:
    """Return a class that is derived from ``cls``, adds slots to it, and has the same name as ``cls``."""
    return type(cls.__name__, (Slotted, cls), attributes_like(cls, slotted))


def attributes_like(cls: type, make: Callable[[type], type]) -> dict[str, Any]:
    """Return the attributes that make a derived class look like ``cls``.

    ``make``: the function that derives the class from ``cls``.  Copying or unpickling an object of the derived class calls
    this function again.
    """
    return {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce_ex__": lambda self, protocol: (_empty, (make, cls), self.__dict__),
        _PLAIN: cls,
    }


def original_class(cls: type) -> type:
    """Return the class from which ``cls`` was derived with :func:`attributes_like`.  If ``cls`` was not derived in this way,
    return ``cls`` itself."""
    base: type = vars(cls).get(_PLAIN, cls)
    return base


def _empty(make: Callable[[type], type], cls: type) -> Any:
    kind: Any = make(cls)
    return kind.__new__(kind)
