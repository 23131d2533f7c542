"""The errors of operations that an offloaded weight does not support."""

from __future__ import annotations

from typing import Any, NoReturn

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.private_torch.dynamo import ShortenTraceback


class CompiledViewError(ChunkflowError, ShortenTraceback):
    """A ChunkflowError that is raised while Dynamo traces; Dynamo passes it on unchanged."""

    def __init__(self, said: str) -> None:
        super().__init__(said, first_useful_frame=None)


def refusal(weight: Any, what: str) -> str:
    """Return the text of the error for an operation ``what`` on a HostWeight."""
    return (
        f"{what} needs the memory of {weight.buffer.name} on {weight.device}, but ChunkFlow keeps this weight in host "
        "memory: use weight.cpu() or model.state_dict(), which return ordinary tensors, or call "
        "chunkflow_compile.restore(model) first."
    )


def refuse(weight: Any, what: str) -> NoReturn:
    """Raise ChunkflowError for an operation ``what`` on a HostWeight."""
    raise ChunkflowError(refusal(weight, what))
