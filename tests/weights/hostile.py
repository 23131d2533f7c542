"""Fifty things that nobody should do to a weight.  Each must end in an exception or do no harm."""

from __future__ import annotations

import copy
import ctypes
import gc
import io
import multiprocessing.reduction
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from helpers import Stack, twins
from torch import nn

from chunkflow_compile import offload, restore

Weight = nn.Parameter

ATTEMPTS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "data_ptr": lambda w, m: w.data_ptr(),
    "read at data_ptr": lambda w, m: ctypes.string_at(w.data_ptr(), 4),
    "storage": lambda w, m: w.storage()[0],
    "untyped_storage": lambda w, m: w.untyped_storage()[0],
    "untyped_storage list": lambda w, m: w.untyped_storage().tolist(),
    "untyped_storage clone": lambda w, m: w.untyped_storage().clone(),
    "untyped_storage fill": lambda w, m: w.untyped_storage().fill_(0),
    "untyped_storage resize": lambda w, m: w.untyped_storage().resize_(64),
    "untyped_storage copy": lambda w, m: w.untyped_storage().copy_(torch.zeros(2).untyped_storage()),
    "set_": lambda w, m: w.data.set_(torch.zeros(4)),
    "set_ from it": lambda w, m: torch.zeros(4).set_(w.data),
    "resize_": lambda w, m: w.data.resize_(2),
    "resize_as_": lambda w, m: w.data.resize_as_(torch.zeros(2)),
    "t_": lambda w, m: w.data.t_(),
    "squeeze_": lambda w, m: w.data.squeeze_(),
    "as_strided_": lambda w, m: w.data.as_strided_((2,), (1,)),
    "as_strided far": lambda w, m: w.as_strided((10**6,), (1,)).sum(),
    "numpy": lambda w, m: w.detach().numpy().sum(),
    "numpy write": lambda w, m: w.detach().numpy().fill(0),
    "asarray": lambda w, m: np.asarray(w.detach()).sum(),
    "dlpack": lambda w, m: torch.from_dlpack(w.detach()).sum(),
    "dlpack capsule": lambda w, m: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(w.detach())).sum(),
    "numpy dlpack": lambda w, m: np.from_dlpack(w.detach()).sum(),
    "cuda interface": lambda w, m: w.__cuda_array_interface__,
    "share_memory_": lambda w, m: w.share_memory_(),
    "model share_memory": lambda w, m: m.share_memory(),
    "send to a process": lambda w, m: multiprocessing.reduction.ForkingPickler(io.BytesIO()).dump(w),
    "pin_memory": lambda w, m: w.pin_memory(),
    "memoryview": lambda w, m: memoryview(w),
    "bytes": lambda w, m: bytes(w),
    "frombuffer": lambda w, m: torch.frombuffer(w, dtype=torch.uint8),
    "tensor of it": lambda w, m: torch.tensor(w).sum(),
    "asarray torch": lambda w, m: torch.asarray(w).sum(),
    "legacy constructor": lambda w, m: torch.Tensor(w).sum(),
    "make_subclass": lambda w, m: torch.Tensor._make_subclass(nn.Parameter, w.data).sum(),
    "parameter of it": lambda w, m: nn.Parameter(w).sum(),
    "shallow copy": lambda w, m: copy.copy(w).sum(),
    "grow": lambda w, m: setattr(w, "data", torch.zeros(100, 100)),
    "another dtype": lambda w, m: setattr(w, "data", w.data.half()),
    "meta data": lambda w, m: setattr(w, "data", torch.empty(2, device="meta")),
    "sparse data": lambda w, m: setattr(w, "data", torch.zeros(2, 2).to_sparse()),
    "to sparse": lambda w, m: w.to_sparse().sum(),
    "to mkldnn": lambda w, m: w.detach().to_mkldnn().to_dense().sum(),
    "quantize": lambda w, m: torch.quantize_per_tensor(w.detach(), 0.1, 0, torch.qint8).dequantize().sum(),
    "gradients": lambda w, m: (w * 2).sum().backward(),
    "optimizer": lambda w, m: _step(w),
    "vmap": lambda w, m: torch.vmap(lambda row: row.sum())(w),
    "grad of a function": lambda w, m: torch.func.grad(lambda v: (v * v).sum())(w),
    "functional call": lambda w, m: torch.func.functional_call(m, dict(m.named_parameters()), torch.ones(2, 8)),
    "swap": lambda w, m: torch.utils.swap_tensors(w, nn.Parameter(torch.zeros(3))),
    "jit trace": lambda w, m: torch.jit.trace(m, torch.ones(2, 8))(torch.ones(2, 8)),
    "script": lambda w, m: torch.jit.script(m)(torch.ones(2, 8)),
    "export": lambda w, m: torch.export.export(m, (torch.ones(2, 8),)).module()(torch.ones(2, 8)),
    "in a thread": lambda w, m: _in_thread(lambda: w.mul_(2)),
    "dropped": lambda w, m: (delattr(m.blocks[0].up, "weight"), gc.collect()),
    "compiled elsewhere": lambda w, m: torch.compile(m, backend="aot_eager")(torch.ones(2, 8)),
}


def _step(weight: nn.Parameter) -> None:
    optimizer = torch.optim.AdamW([weight])
    (weight * 2).sum().backward()
    optimizer.step()


def _in_thread(work: Callable[[], Any]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def attempt_all(rank: int, path: str, pack: bool) -> None:
    """Writes to a file what each attempt says."""
    with open(path, "w", buffering=1) as file:  # by lines: the process may end
        for name, attempt in ATTEMPTS.items():
            model = twins(Stack)[0]
            offload(model.bfloat16() if pack else model, min_bytes=1024, pack=pack)
            try:
                attempt(model.blocks[0].up.weight, model)
                file.write(f"{name}: done\n")
            except Exception as error:  # noqa: BLE001
                file.write(f"{name}: {type(error).__name__}: {str(error).strip().partition(chr(10))[0]}\n")
            restore(model)
            sum(float(p.sum()) for p in model.parameters())
