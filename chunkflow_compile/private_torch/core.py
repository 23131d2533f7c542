"""The functions of torch._C, torch's compiled core, that ChunkFlow uses because torch has no public equivalents.

Functions that only some builds of torch have (with CUDA, or with torch.distributed) are looked up when they are called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A context in which tensor subclasses override no functions.  Outside it, even reading ``_version`` of a tensor subclass
# calls its __torch_function__.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# The __torch_function__ of a tensor subclass that overrides no functions.
disabled_torch_function = torch._C._disabled_torch_function_impl
# Exchanges the values of two tensors, even if weak references to them exist.  It is a single call into C, which Ctrl-C cannot
# interrupt halfway.
swap_values: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
# Makes C++ code that asks a tensor without memory for its data pointer get an error instead of a null pointer.
forbid_data_pointer: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
# The number of active TorchDispatchModes on this thread.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether autocast is enabled for any device.
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled


def fake_mode() -> Any:
    """Return the active FakeTensorMode, or None if there is none."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def view_tracking(on: bool) -> contextlib.AbstractContextManager[Any]:
    """Return a context.  If ``on``, views that are created in it know their base and share its version counter; otherwise
    they do neither."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, not on)


@contextlib.contextmanager
def unprofiled() -> Iterator[None]:
    """Return a context in which profilers do not record the ops of this thread."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def storage_uses(tensor: torch.Tensor) -> int:
    """Return the number of references to the memory of a tensor, which tensors, storages and NumPy arrays hold."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def work_of(future: torch.futures.Future[Any]) -> Any:
    """Return a ``Work``, as a process group returns for a collective, that completes when ``future`` completes."""
    # looked up by name, because torch's type stubs do not contain it
    made: Any = torch._C._distributed_c10d.__dict__["_create_work_from_future"](future)
    return made


def free_cublas_workspaces() -> None:
    """Free the workspaces that cuBLAS keeps for each stream."""
    torch._C._cuda_clearCublasWorkspaces()


def end_pool(device: int, pool: Any) -> None:
    """Stop allocating from a memory pool, after the capture of a CUDA graph failed and ``capture_end`` did not do so.
    ``device``: the index of the GPU.

    Raises RuntimeError if allocation from the pool has already ended.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
