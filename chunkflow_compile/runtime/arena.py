"""The device arena: one allocation and the streams over it, which programs share, one step at a time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.plan import ALIGNMENT, Plan

from .device import Device, DeviceKind, check_device, make_device
from .locks import ProcessLock

Make = Callable[[torch.device, DeviceKind], Device]


class Tenant(Protocol):
    """A program in an arena, whether its chunks lie there now or not: those of one tenant do, the arena's holder."""

    @property
    def plan(self) -> Plan: ...

    code: Any
    """What stays the same when the program is bound anew, by identity: what was proved of it holds."""

    def close(self) -> None:
        """Leaves the arena; whoever calls the program again makes it anew."""


class Arena:
    """Device memory and streams that programs share: as large as the largest plan that ran in it, not as all together.

    The programs of one model share an arena by themselves.  Hand one to several models, as
    ``options={"arena": arena}``, where they take turns: the two transformers of Wan 2.2, a text encoder and a
    transformer.  Each change from one program to another is a cold start.
    """

    def __init__(self, device: torch.device | str = "cpu", *, make: Make = make_device) -> None:
        """``make``: makes the streams, given the device and its kind.  Raises ChunkflowError for unknown devices."""
        self.device = check_device(torch.device(device))
        self.lock = ProcessLock()  # held for a step
        self.holder: object = None  # the executor whose chunks lie in the memory
        self._make = make
        self._kind = DeviceKind()
        self._streams: Device | None = None
        self._memory: torch.Tensor | None = None
        self._tenants: list[weakref.ref[Any]] = []
        self._proved: weakref.WeakKeyDictionary[Any, weakref.WeakSet[Any]] = weakref.WeakKeyDictionary()

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated now."""
        return 0 if self._memory is None else self._memory.numel()

    @property
    def streams(self) -> Device:
        if self._streams is None:
            raise ChunkflowError("Nothing runs in this arena: call the compiled model again.")
        return self._streams

    @property
    def tenants(self) -> Sequence[Any]:
        """The programs that are bound to the memory, oldest first."""
        return [t for ref in self._tenants if (t := ref()) is not None]

    def prove(self, code: Any, together: Callable[[Any], None]) -> None:
        """Calls ``together`` with the code of each other tenant, once for every two."""
        for other in [t.code for t in self.tenants if t.code is not code]:
            if code not in self._proved.setdefault(other, weakref.WeakSet()):
                together(other)
                self._proved[other].add(code)
                self._proved.setdefault(code, weakref.WeakSet()).add(other)

    def join(self, tenant: Tenant, *, kind: DeviceKind | None = None, advice: Callable[[], str] = str) -> torch.Tensor:
        """The memory, uint8, of at least the tenant's ``plan.arena_bytes``, from a multiple of 256 bytes on.

        Where it was smaller before, the other tenants are closed and it is allocated anew.  Raises ChunkflowError if
        there is no room, with ``advice`` on what would fit, and for another ``kind`` of device than the other tenants have.
        """
        kind = kind or DeviceKind()
        with self.lock():
            self.sweep()
            if self._streams is None:
                self._streams, self._kind = self._make(self.device, kind), kind
            elif kind != self._kind:
                raise ChunkflowError(
                    'Programs that share an arena run on the same streams: give all of them debug="threads", or none, and '
                    "the same hardware where it emulates a link."
                )
            nbytes = tenant.plan.arena_bytes
            self._tenants.append(weakref.ref(tenant))
            try:
                if self._memory is None or self.nbytes < nbytes:
                    for other in self.tenants:
                        if other is not tenant:
                            other.close()
                    self._memory = self.holder = None
                    self._memory = self._allocate(nbytes, advice)
            except BaseException:
                self.leave(tenant)
                raise
            return self._memory

    def leave(self, tenant: Tenant) -> None:
        """Forgets a tenant; with the last one the memory is freed and the streams end."""
        with self.lock():
            self._tenants = [ref for ref in self._tenants if ref() is not tenant]
            self.sweep()

    def sweep(self) -> None:
        """Forgets tenants that were dropped instead of closed."""
        with self.lock():
            self._tenants = [ref for ref in self._tenants if ref() is not None]
            if not self._tenants and self._streams is not None:
                streams, memory = self._streams, self._memory
                self._streams = self._memory = self.holder = None
                streams.close()
                del memory  # not sooner: copies may have been under way into it

    def _allocate(self, nbytes: int, advice: Callable[[], str]) -> torch.Tensor:
        try:
            with torch.inference_mode(False):  # which would not let copies into it once the mode is left
                raw = self.streams.allocate(nbytes + ALIGNMENT)
        except RuntimeError as error:
            raise ChunkflowError(
                f"The device {self.device} has no room for an arena of {nbytes} bytes ({str(error).splitlines()[0]}). "
                f"{advice()}Free memory on the device, or give less as memory=."
            ) from error
        start = -raw.data_ptr() % ALIGNMENT
        return raw[start : start + nbytes]

    def __deepcopy__(self, _: object) -> Arena:
        """Who copies a model compiled with an arena shares the arena."""
        return self

    def __reduce_ex__(self, _: object) -> NoReturn:
        raise ChunkflowError(
            "An arena is memory of this process's device and cannot be copied or pickled: make another with "
            "chunkflow_compile.Arena(device)."
        )
