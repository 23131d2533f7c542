"""Stand-ins for modules that SGLang imports and that have no build for a CPU, or that no test calls."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import re
import sys
import types
from collections.abc import Sequence
from importlib import import_module
from typing import Any

# Module -> why it is not the real one.
STANDS_IN = {
    "IPython": "only notebooks need it, and it brings a dozen packages",
    "sgl_kernel": "on PyPI it is built for CUDA",
    "torchvision": "on PyPI it is built for CUDA, beside another torch",
}


class _Anything(type):
    """A class that has every attribute, and returns a function that it decorates."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.__dict__.get("_itself") and len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return type.__call__(cls) if cls.__dict__.get("_itself") else type.__call__(cls, *args, **kwargs)

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


def _anything(name: str) -> type:
    def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self

    return _Anything(name, (), {"_itself": True, "__call__": called, "__iter__": lambda self: iter(())})


class _Module(types.ModuleType):
    __path__ = ()
    __version__ = "99"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _anything(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """``library``: of the kernels, which last as long as it."""

    def __init__(self, library: Any) -> None:
        self.library = library

    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name.partition(".")[0] not in STANDS_IN:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None:
        pass


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
    sys.meta_path.append(_Finder(library))


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
