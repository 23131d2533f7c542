"""The host store: where the bytes of offloaded parameters live, one tensor per parameter."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError

from .host_memory import near_cpus, own_pages
from .progress import moving
from .reader import HostReader
from .staging import GpuStagings

# Attribute of an offloaded parameter that holds its Home.  It identifies the parameter, where a name could be wrong.
HOME = "_chunkflow_home"
# Makes a CUDA tensor around a storage, which may be smaller than the tensor.  torch's graph trees use it.
_CONSTRUCT = "_construct_CUDA_Tensor_From_Storage_And_Metadata"


@dataclass(eq=False)
class Home:
    """One offloaded parameter.  ``host``: its values, on the CPU.  ``names``: all its names in the model.

    ``origin``: the device that it came from.
    """

    names: tuple[str, ...]
    parameter: nn.Parameter
    host: torch.Tensor
    store: HostStore
    origin: torch.device
    _resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
    _unpin: weakref.finalize[[list[HostReader], Callable[[], None]], Home] | None = None
    _copied_by: list[HostReader] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    def resident(self, stagings: GpuStagings) -> torch.Tensor:
        """A copy of the values on the store's device, shared by all programs that use it at the same time."""
        if self._resident is not None:
            version, ref = self._resident
            found = ref()
            if found is not None and version == self.host._version:
                return found
        version = self.host._version  # before the copy: newer values need another
        made = stagings.brought(self.host, self.store.device, copy=True)
        self._resident = version, weakref.ref(made)
        return made

    def pin(self, device: HostReader, budget: int) -> None:
        """Pin the host memory for the device's copies, once; if that fails, the store warns.

        ``budget``: most bytes of the store to pin.
        """
        self._copied_by[:] = [d for d in self._copied_by if d is not device and not d.closed] + [device]
        if self._unpin is not None or not self.store.pins:
            return
        try:
            if device.name == "cuda" and self.store.pinned_bytes + self.nbytes > budget:
                raise OSError(f"the budget is {budget} bytes, see the option pin_memory")
            # a model that is dropped without restore must not leave its pages pinned after they are unmapped
            self._unpin = weakref.finalize(self, _unpin, self._copied_by, device.pin(self.host))
            self._unpin.atexit = False
        except OSError as error:
            self.store.pageable(self, error)

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    @property
    def pinned(self) -> bool:
        return self._unpin is not None

    def settle(self) -> None:
        """Wait for the copies that read the host memory for steps that have returned."""
        for device in self._copied_by:
            device.settle()

    def check(self, parameter: torch.Tensor) -> None:
        """Raise ChunkflowError if the parameter is no longer the empty one that offload left."""
        if parameter is not self.parameter:
            found = "was replaced by another parameter"
        elif parameter.untyped_storage().nbytes():
            found = "was given new storage"
        elif parameter.shape != self.host.shape or parameter.dtype != self.host.dtype:
            found = f"became {parameter.dtype}{list(parameter.shape)}"
        else:
            return
        raise ChunkflowError(
            f"The weight {self.name} {found} after offload, so the host copy may be out of date. Change weights through "
            "load_state_dict, or call chunkflow_compile.restore(model) before changing them and offload again after."
        )


@dataclass(eq=False)
class HostStore:
    """The offloaded parameters of the model ``root``, whose programs run on ``device``.

    ``pins``: whether to pin host memory; False after pinning failed once.  ``pages``: whether each weight gets pages of
    its own, which can be pinned for a GPU.
    """

    root: nn.Module
    device: torch.device
    homes: list[Home] = field(default_factory=list)
    pins: bool = True
    pages: bool = False
    _cpus: frozenset[int] | None = None

    @property
    def pinned_bytes(self) -> int:
        return sum(h.nbytes for h in self.homes if h.pinned)

    def add(self, names: tuple[str, ...], parameter: nn.Parameter, stagings: GpuStagings) -> Home:
        """Move one parameter's bytes into the store; the parameter keeps 0 bytes of storage on the store's device.

        On the CPU the store takes over the parameter's memory and copies nothing.  For a GPU the bytes are copied, and
        one weight at a time exists twice.
        """
        with torch.inference_mode(False), torch.no_grad():
            values = parameter.detach()
            if values.is_inference():  # has no version counter, by which a session notices new values
                values = values.clone()
            host = values
            if self.pages or values.device.type != "cpu":
                host = own_pages(values, self._near(), stagings.of(values.device))
            home = Home(names, parameter, host, self, values.device)
            empty = _empty(values, self.device)
            self.homes.append(home)  # before the parameter is emptied: an interrupt here loses nothing
            setattr(parameter, HOME, home)
            parameter.data = empty
        return home

    def release(self, device: torch.device | None = None) -> None:
        """Give every parameter its bytes back, on the device that it came from or on ``device``.

        Raises ChunkflowError if there is no room for one; it and the parameters not yet released stay in the store.
        """
        moving_back = moving("bringing weights back", sum(h.nbytes for h in self.homes))
        stagings = GpuStagings()
        with torch.inference_mode(False), torch.no_grad(), moving_back as moved:
            while self.homes:  # each is removed only after its bytes are returned: an interrupt loses none
                home = self.homes[-1]
                if home_of(home.parameter) is home:
                    with no_room_for(home.name, home.nbytes, device or home.origin):
                        home.parameter.data = stagings.brought(home.host, device or home.origin)
                    home.unpin()  # not sooner: pinned memory is copied faster
                    home.parameter.__dict__.pop(HOME, None)
                self.homes.pop()
                moved(home.nbytes)

    def _near(self) -> frozenset[int]:
        if self._cpus is None:
            self._cpus = near_cpus(self.device)
        return self._cpus

    def pageable(self, home: Home, error: OSError) -> None:
        """Continue without pinned memory, and warn once."""
        self.pins = False
        warnings.warn(
            f"The host memory of {home.name} ({home.nbytes} bytes) could not be pinned after {self.pinned_bytes} bytes "
            f"of other weights ({error}). It and the weights after it are copied from pageable memory, which is "
            "slower: a thread of its own sends them through a small pinned ring. Lower the option pin_memory, or free or add "
            "host memory; in a container, raise its memory limit.",
            stacklevel=2,
        )


@torch.compiler.disable  # type: ignore[untyped-decorator]  # a finalizer: the collector may run it anywhere
def _unpin(devices: Sequence[HostReader], undo: Callable[[], None]) -> None:
    """Unpin after the copies that read the memory.  A failed device must not prevent restoring the model."""
    try:
        for device in devices:
            with contextlib.suppress(ChunkflowError):
                device.settle()
    finally:
        try:
            undo()
        except OSError as error:
            warnings.warn(f"Host memory could not be unpinned and stays pinned: {error}.", stacklevel=2)


@contextlib.contextmanager
def no_room_for(name: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a ChunkflowError that names what was being restored."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ChunkflowError(
            f"There is no room on {device} for {name} ({nbytes} bytes): it and the weights not restored yet "
            "stay where they are. Free memory on the device and call restore again, or call restore(model, 'cpu')."
        ) from error


def _empty(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor like ``values`` with no bytes of storage."""
    if device.type == "cuda" and (construct := getattr(torch._C, _CONSTRUCT, None)) is not None:
        # empty_strided would allocate the weight before it can be freed: room that a card may not have
        shape = {"size": tuple(values.shape), "stride": values.stride(), "storage_offset": 0, "dtype": values.dtype}
        made: torch.Tensor = construct(shape, torch.UntypedStorage(0, device=device))
        return made
    empty = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=device)
    empty.untyped_storage().resize_(0)
    return empty


def home_of(parameter: object) -> Home | None:
    """The home of an offloaded parameter, None for any other object."""
    return getattr(parameter, HOME, None)
