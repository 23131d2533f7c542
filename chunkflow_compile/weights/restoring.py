"""Restoring a weight: an offloaded weight becomes an ordinary tensor again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import size

from .backing import Where
from .exchange import become
from .host_weight import HostWeight
from .limits import no_room
from .staging import GpuStagings


@contextlib.contextmanager
def no_room_for(name: str, nbytes: int, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error inside the context into a ChunkflowError that names the weight ``name``, which is
    being restored."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ChunkflowError(
            f"There is no room on {device} for {name} ({size(nbytes)}): it and the weights not restored yet "
            "stay where they are. Free memory on the device and call restore again, or call restore(model, 'cpu')."
        ) from error


def restore_weight(weight: HostWeight, device: torch.device, stagings: GpuStagings) -> None:
    """Turn a weight into an ordinary tensor on ``device``.

    Raises ChunkflowError if the weight does not fit, or if it is in a checkpoint that has changed; the weight is then
    left unchanged.
    """
    buffer = weight.buffer
    with torch.inference_mode(False), torch.no_grad():
        buffer.check()
        if device.type == "cpu":
            if buffer.compressed:
                buffer.unpack(leaving=True)
            if buffer.backing.where is Where.SHARED:
                buffer.make_private()  # writes to an ordinary tensor must not reach other ranks
            if buffer.backing.in_scratch_file and (cause := no_room(weight.host.nbytes)) is not None:
                raise ChunkflowError(
                    f"There is no room in host memory for {buffer.name} ({size(weight.host.nbytes)}): {cause}. It and the "
                    "weights not restored yet stay where they are. Free host memory and call restore again."
                )
        with no_room_for(buffer.name, weight.host.nbytes, device):
            # an ordinary tensor may outlive the placement, so it must not depend on a scratch file
            values = weight.host if device.type == "cpu" else weight.values_on_host
            plain = stagings.copied_to(values, device, copy=buffer.backing.in_scratch_file)
        grad = buffer.grad if buffer.backs(weight) else None
        become(weight, weight.plain(plain))
        weight.__dict__.pop("token", None)
        if grad is not None:
            weight.grad = grad.to(device)
