"""The functions of torch._C, torch's compiled core, that ChunkFlow uses because torch has no public function for them.

Some builds of torch do not have all of it: what only a GPU or a build with torch.distributed has, is looked up when called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

# A context in which no tensor subclass overrides functions: else each tensor is asked, also for _version.
DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
# The __torch_function__ of a subclass that overrides none.
disabled_torch_function = torch._C._disabled_torch_function_impl
# Exchanges the values of two tensors, also of tensors with weak references.  One call into C, so Ctrl-C never comes between.
swap_values: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl
# C++ that asks a tensor without memory for its memory gets an error, not a null pointer.
forbid_data_pointer: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
# How many modes of dispatch are entered on this thread.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Whether autocast is on for any device.
autocasts: Callable[[], bool] = torch._C._is_any_autocast_enabled


def fake_mode() -> Any:
    """The FakeTensorMode that is entered; None if there is none, and ops run."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)


def view_tracking(on: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which views refer to their base, and have its version counter, or do not."""
    return torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, not on)


@contextlib.contextmanager
def unprofiled() -> Iterator[None]:
    """A context in which no profiler sees the ops of this thread."""
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def storage_uses(tensor: torch.Tensor) -> int:
    """How many tensors, arrays and storages refer to the memory of a tensor."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def work_of(future: torch.futures.Future[Any]) -> Any:
    """The work of a process group that is over when ``future`` is."""
    made: Any = torch._C._distributed_c10d.__dict__["_create_work_from_future"](
        future
    )  # in every release, but in no stub
    return made


def free_cublas_workspaces() -> None:
    """Free the workspaces of cuBLAS, each of a stream."""
    torch._C._cuda_clearCublasWorkspaces()


def end_pool(device: int, pool: Any) -> None:
    """End the allocations of a capture in a pool of memory that ``capture_end`` did not end.  ``device``: its index.

    Raises RuntimeError if it is ended.
    """
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
