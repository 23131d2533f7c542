"""The host store: where the bytes of offloaded parameters live, one tensor a parameter."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError

from .device import Device

# Attribute of an offloaded parameter that leads to its home: identity, where a name could be wrong.
HOME = "_chunkflow_home"


@dataclass(eq=False)
class Home:
    """One offloaded parameter.  ``host``: its values, on the CPU.  ``names``: every name of it in the model."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    host: torch.Tensor
    store: HostStore
    _resident: tuple[int, weakref.ref[torch.Tensor]] | None = None
    _unpin: Callable[[], None] | None = None

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        return self.host.numel() * self.host.element_size()

    def resident(self) -> torch.Tensor:
        """A copy of the values on the store's device, which the programs that are alive at the same time share."""
        if self._resident is not None:
            version, ref = self._resident
            found = ref()
            if found is not None and version == self.host._version:
                return found
        version = self.host._version  # before the copy: newer values make another
        made = self.host.to(self.store.device, copy=True)
        self._resident = version, weakref.ref(made)
        return made

    def pin(self, device: Device) -> None:
        """Lets the device copy from the host memory by itself, once; where it cannot be pinned, the store warns."""
        if self._unpin is None and self.store.pins:
            try:
                self._unpin = device.pin(self.host)
            except OSError as error:
                self.store.pageable(self, error)

    def unpin(self) -> None:
        if self._unpin is not None:
            self._unpin()
            self._unpin = None

    def check(self, parameter: torch.Tensor) -> None:
        """Raises ChunkflowError if the parameter is no longer the empty one that offload left."""
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

    ``pins``: whether host memory is pinned; False once it could not be.
    """

    root: nn.Module
    device: torch.device
    homes: list[Home] = field(default_factory=list)
    pins: bool = True

    def add(self, names: tuple[str, ...], parameter: nn.Parameter) -> Home:
        """Moves one parameter's bytes into the store and leaves it 0 bytes of storage on the store's device.

        On the CPU the bytes stay where they are and change owner, so no second copy is ever made.
        """
        with torch.inference_mode(False), torch.no_grad():
            values = parameter.detach()
            if values.is_inference():  # has no version, by which a session notices new values
                values = values.clone()
            home = Home(names, parameter, values if values.device.type == "cpu" else values.to("cpu"), self)
            empty = torch.empty_strided(values.shape, values.stride(), dtype=values.dtype, device=self.device)
            empty.untyped_storage().resize_(0)
            self.homes.append(home)  # before the parameter is emptied: an interrupt here loses nothing
            setattr(parameter, HOME, home)
            parameter.data = empty
        return home

    def release(self) -> None:
        """Gives every parameter its bytes back."""
        with torch.inference_mode(False), torch.no_grad():
            for home in reversed(self.homes):  # again from the start, if an interrupt comes
                if home_of(home.parameter) is home:
                    home.unpin()
                    home.parameter.data = home.host.to(self.device)
                    home.parameter.__dict__.pop(HOME, None)
            self.homes.clear()

    def pageable(self, home: Home, error: OSError) -> None:
        """Goes on without pinned memory, and says so once."""
        self.pins = False
        pinned = sum(h.nbytes for h in self.homes if h._unpin is not None)
        warnings.warn(
            f"The host memory of {home.name} ({home.nbytes} bytes) could not be pinned, behind {pinned} bytes that were "
            f"({error}): it and the weights behind it are copied from pageable memory, which is slower. "
            "Raise the limit of locked memory (ulimit -l), or give the process more memory.",
            stacklevel=2,
        )


def home_of(parameter: object) -> Home | None:
    """The home of an offloaded parameter, None of any other object."""
    return getattr(parameter, HOME, None)
