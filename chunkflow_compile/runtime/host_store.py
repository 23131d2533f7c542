"""The host store: where the bytes of offloaded parameters live, one tensor a parameter."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from chunkflow_compile.passes.errors import ChunkflowError

# Attribute of an offloaded parameter that leads to its home: identity, where a name could be wrong.
HOME = "_chunkflow_home"


@dataclass(eq=False)
class Home:
    """One offloaded parameter.  ``host``: its values, on the CPU.  ``names``: every name of it in the model."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    host: torch.Tensor
    store: HostStore

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def nbytes(self) -> int:
        return self.host.numel() * self.host.element_size()

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
    """The offloaded parameters of the model ``root``, whose programs run on ``device``."""

    root: nn.Module
    device: torch.device
    homes: list[Home] = field(default_factory=list)

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
            parameter.data = empty
        setattr(parameter, HOME, home)
        self.homes.append(home)
        return home

    def release(self) -> None:
        """Gives every parameter its bytes back."""
        with torch.inference_mode(False), torch.no_grad():
            while self.homes:
                home = self.homes[-1]
                home.parameter.data = home.host.to(self.device)
                delattr(home.parameter, HOME)
                self.homes.pop()


def home_of(parameter: object) -> Home | None:
    """The home of an offloaded parameter, None of any other object."""
    return getattr(parameter, HOME, None)
