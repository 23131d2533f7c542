"""Stand-ins for SGLang: modules, the kernels of one of them, and its functions for a CPU."""

from __future__ import annotations

import re
import sys
from importlib import import_module
from typing import Any

from stand_ins import Finder

# Module -> why it is not the real one.
STANDS_IN = {
    "IPython": "only notebooks need it, and it brings a dozen packages",
    "sgl_kernel": "on PyPI it is built for CUDA",
    "torchvision": "on PyPI it is built for CUDA, beside another torch",
}


def stand_in() -> None:
    """Let imports of the modules find their stand-ins, and SGLang the kernels that a build of sgl_kernel for CPUs has."""
    import torch
    from torch.nn import functional

    def norm(x: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float) -> Any:
        if kind == "rms":
            found = functional.rms_norm(x.float(), x.shape[-1:], weight, eps)
        else:
            found = functional.layer_norm(x.float(), x.shape[-1:], weight, bias, eps)
        return (found * (1 + scale) + shift).to(x.dtype)

    def scale_shift(x: Any, scale: Any, shift: Any, constant: float) -> Any:
        return x * (constant + scale) + shift

    def gated_norm(
        residual: Any, x: Any, gate: Any, weight: Any, bias: Any, scale: Any, shift: Any, kind: str, eps: float
    ) -> Any:
        total = residual + (x if gate is None else x * gate)
        return norm(total, weight, bias, scale, shift, kind, eps), total

    library = torch.library.Library("sgl_kernel", "DEF")
    for schema, kernel in (
        ("fused_norm_scale_shift_cpu(T x, T? w, T? b, T scale, T shift, str kind, float eps) -> T", norm),
        ("fused_scale_shift_cpu(T x, T scale, T shift, float constant) -> T", scale_shift),
        (
            "fused_scale_residual_norm_scale_shift_cpu(T residual, T x, T? gate, T? w, T? b, T scale, T shift, str kind, "
            "float eps) -> (T, T)",
            gated_norm,
        ),
    ):
        name = library.define(re.sub(r"\bT\b", "Tensor", schema))
        library.impl(name, kernel, "CompositeExplicitAutograd")
    finder = Finder(STANDS_IN)
    finder.kernels = library  # which last as long as it
    sys.meta_path.append(finder)


def bind_fallbacks() -> None:
    """Let SGLang take the function that stands for a Triton kernel on a CPU when it is asked for, not at each call.

    It imports the module of that function in each call, where Dynamo breaks the graph; on a GPU nothing does so.
    """
    from sglang.kernels.ops.diffusion.common import platform

    def bound(kind: str, name: str) -> Any:
        try:
            return getattr(import_module(f"sglang.kernels.ops.diffusion.common.fallback_{kind}"), name)
        except ImportError:  # of other machines
            return None

    platform.lazy_fallback = bound
