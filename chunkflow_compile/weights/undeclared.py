"""Writes that the schema of an op does not declare, found by their effect.

Ops of torch's own namespaces declare what they write.  Collectives (``c10d``) and ops of extensions may not, so they get
copies of the weights.  A copy that differs from its weight after the op was written: its values go to the host memory, at
once or, if the op returns a work, when that is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree

from chunkflow_compile.passes.errors import ChunkflowError

from .host_buffer import Arriving, HostBuffer

_aten = torch.ops.aten
# Namespaces of torch whose schemas declare every write.
_DECLARED = frozenset(
    ("aten", "prims", "inductor_prims", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "chunkflow")
)
# They write running statistics in training.
_STATISTICS = frozenset(
    (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
)
# They hand the memory of a tensor to other ranks, or return before they have written it and return no work.
_UNSEEN = frozenset(("_c10d_functional::irecv", "_c10d_functional::batch_p2p_ops", "inductor::resize_storage_bytes_"))
# Integers of the same size, in which equal means equal bit by bit.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Weight(Protocol):
    """An offloaded weight, as this module knows it: its memory, a view of that, and its name for errors."""

    buffer: HostBuffer
    host: torch.Tensor
    label: str

    def fetch(self) -> torch.Tensor:
        """A copy of the values on the device; on the CPU the host memory itself."""


def declares(func: Any) -> bool:
    """Whether the schema of an op tells which of its arguments it writes."""
    return func.namespace in _DECLARED and func not in _STATISTICS


def cannot_be_seen(func: Any) -> bool:
    """Whether an op may write a tensor later, in a way that nothing tells."""
    return func.namespace == "symm_mem" or func.name().partition(".")[0] in _UNSEEN


def settled(func: Any, values: Sequence[torch.Tensor]) -> None:
    """Wait until a functional collective has written ``values``, which it may do after it returns."""
    if func.namespace == "_c10d_functional":
        for value in values:
            torch.ops._c10d_functional.wait_tensor(value)


def on_copies(kind: type[Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op on copies of the weights among its arguments, and give the weights what it writes to them.

    Raises ChunkflowError if the op returns other memory of a copy, because a write to that would go unnoticed.
    """
    weights: dict[int, Weight] = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, kind)}
    copies = {key: _copy(weight) for key, weight in weights.items()}
    found, named = pytree.tree_map_only(kind, lambda w: copies[id(w)], (tuple(args), dict(kwargs)))
    result = func(*found, **named)
    given = {id(copies[key]): weight for key, weight in weights.items()}
    memory = {copies[key].untyped_storage()._cdata: weight for key, weight in weights.items()}
    work = next((dist.Work.unbox(x) for x in pytree.tree_leaves(result) if _is_a("Work", x)), None)
    arrival = Arrival(
        [(w.host, w.buffer, copies[key]) for key, w in weights.items()], work, coalesced=any(map(_coalesces, args))
    )

    def returned(value: Any) -> Any:
        if _is_a("Work", value):
            return arrival.work.boxed()  # type: ignore[union-attr]
        if not isinstance(value, torch.Tensor) or id(value) in given:
            return given.get(id(value), value)
        if value.layout == torch.strided and (weight := memory.get(value.untyped_storage()._cdata)) is not None:
            raise ChunkflowError(
                f"{func} returns memory of {weight.label}, which its schema does not declare, so a write to it would go "
                "unnoticed: let the op declare that, or return a copy; or call chunkflow_compile.restore(model) first."
            )
        return value

    result = pytree.tree_map(returned, result)
    arrival.expect()
    return result


def _copy(weight: Weight) -> torch.Tensor:
    """The values on the device, in memory of their own."""
    values = weight.fetch()
    return values.clone() if values is weight.host else values


def _is_a(name: str, value: Any) -> bool:
    """Whether an argument or a result of a ``c10d`` op is an object of this class of C++."""
    if not isinstance(value, torch.ScriptObject):
        return False
    kind: Any = value._type()
    return bool(kind.name() == name)


def _coalesces(value: Any) -> bool:
    """Whether this is a process group that collects collectives, so that the work of each says nothing."""
    if not _is_a("ProcessGroup", value):
        return False
    return dist.ProcessGroup.unbox(value) in dist.distributed_c10d._world.pg_coalesce_state


class Arrival:
    """What an op may still write to weights.

    ``copies``: the host memory of each weight, and the copy that the op got.  ``work``: the one that the op has returned, or
    None.  ``coalesced``: whether it says nothing.
    """

    def __init__(
        self, copies: Sequence[tuple[torch.Tensor, HostBuffer, torch.Tensor]], work: Any, coalesced: bool
    ) -> None:
        self.work = None if work is None else Landing(self, work)  # kept: C++ does not keep what is made in Python
        self._copies = list(copies)
        self._on_device = any(values.is_cuda for _, _, values in copies)
        self._coalesced = coalesced
        self._followed = False
        self._waiting: list[list[Arriving]] = []
        self._lock = threading.Lock()

    def expect(self) -> None:
        """Let the weights have what was written: now, or when the works are over."""
        if self.work is None:
            self._land()
            return
        self._waiting = [*{id(buffer.arriving): buffer.arriving for _, buffer, _ in self._copies}.values()]
        for waiting in self._waiting:
            waiting.append(self)

    @property
    def over(self) -> bool:
        """Whether nothing more is to come, or the stream of the caller waits for it.

        A work on a device need not be over when the caller has waited for it.
        """
        waits = self._on_device and (self._coalesced or self._followed)
        return waits or self.work is None or self.work.is_completed()

    def land(self) -> None:
        """Give the weights what was written.  Nothing more is to come, or the stream waits for it."""
        with self._lock:
            self._land()
        for waiting in self._waiting:
            if self in waiting:
                waiting.remove(self)
        self._waiting = []

    def _land(self) -> None:
        if self._coalesced and self._on_device:
            for device in {values.device for _, _, values in self._copies if values.is_cuda}:
                torch.cuda.synchronize(device)  # whichever stream the batch was sent on
        while self._copies:
            host, buffer, values = self._copies[-1]
            found = values.to(host.device)
            buffer.check()
            if not same_bits(host, found):
                with buffer.write(), torch.no_grad():
                    host.copy_(found)
                    buffer.written += 1
            self._copies.pop()

    def follow_to(self, buffer: HostBuffer, before: torch.Tensor, now: torch.Tensor) -> None:
        """The weight with the memory ``before`` is an ordinary tensor now: it gets what arrives."""
        with self._lock:
            for number, (host, of, values) in enumerate(self._copies):
                if of is buffer:
                    offset = now.storage_offset() + host.storage_offset() - before.storage_offset()
                    self._copies[number] = now.as_strided(host.shape, host.stride(), offset), HostBuffer(now), values

    def follow(self) -> None:
        """The stream of the caller waits for the work from here on."""
        self._followed = True


def arrive(arriving: Sequence[Arriving]) -> None:
    """Let weights take what collectives that are over have written.  No lock of an arena is held."""
    for arrival in [a for a in arriving if a.over]:
        arrival.land()


class Landing(getattr(dist, "Work", object)):  # type: ignore[misc]
    """The work of a collective that may write weights: to wait for it gives them their values."""

    def __init__(self, arrival: Arrival, inner: Any) -> None:
        super().__init__()
        self._arrival = arrival
        self._inner = inner

    def wait(self, *timeout: Any, **named: Any) -> bool:
        done = self._inner.wait(*timeout, **named)
        self._arrival.land()
        return bool(done)

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._arrival.land()

    def block_current_stream(self) -> None:
        self._inner.block_current_stream()
        self._arrival.follow()

    def get_future(self) -> Any:
        """That of the collective.  The weights take what it has brought when they are next used."""
        self._arrival.follow()
        return self._inner.get_future()

    def is_completed(self) -> bool:
        return bool(self._inner.is_completed())

    def is_success(self) -> bool:
        return bool(self._inner.is_success())

    def exception(self) -> Any:
        return self._inner.exception()

    def source_rank(self) -> int:
        return int(self._inner.source_rank())

    def _source_rank(self) -> int:
        return int(self._inner._source_rank())

    def result(self) -> Any:
        return self._inner.result()


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one dtype and shape are equal bit by bit."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    return torch.equal(*(t.view(_BITS[t.itemsize]) for t in (one, other)))
