"""Tracing of code that reads offloaded weights: the backend for which Dynamo traces, and the op that copies a weight in
the graphs of other backends."""

from __future__ import annotations

import torch

from chunkflow_compile.private_torch.dynamo import InstructionTranslator

# The name of ChunkFlow's backend.
OURS = "chunkflow"

_LIBRARY = torch.library.Library("chunkflow", "FRAGMENT")
_LIBRARY.define("fetch(Tensor host, Device device) -> Tensor")
_LIBRARY.impl("fetch", lambda host, device: host.to(device, copy=True), "CompositeExplicitAutograd")
torch.library.register_fake(
    "chunkflow::fetch", lambda host, device: torch.empty_like(host, device=device), lib=_LIBRARY
)
# The op that copies a weight from host memory to the device in the graphs of other backends.
FETCH = torch.ops.chunkflow.fetch.default


def tracing_backend() -> str | None:
    """Return the name of the backend for which Dynamo is tracing in this thread.  Return None if Dynamo is not tracing,
    or is tracing for torch.export, which executes nothing."""
    try:
        output = InstructionTranslator.current_tx().output
    except AttributeError:  # Dynamo is not tracing in this thread
        return None
    backend = output.compiler_fn
    return None if output.export else getattr(backend, "compiler_name", getattr(backend, "__name__", "a function"))


def traces_for_us() -> bool:
    """Whether Dynamo is tracing for ChunkFlow in this thread.

    A program gets each weight as an ordinary tensor on the device, so the trace contains such a tensor, too.  A tensor
    subclass in the trace would not work with loops (``while_loop``) and ``flex_attention``.
    """
    return tracing_backend() == OURS
