"""What Inductor does once in a process for the CPU, in a thread while the model is traced.

It finds the vector instructions, and precompiles the header of its kernels.  With empty caches, both run the C++ compiler for
half of the first step, and with full ones the search still starts a process for each candidate.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading

import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache

from chunkflow_compile.hardware.caches import remove_torn

_KERNEL = 'extern "C" void kernel(float* out) {}'


def warm_up(device: torch.device) -> None:
    """Start it for a model on the CPU, once in a process, unless the user has chosen the instructions."""
    if device.type == "cpu" and _strongest_is_taken():
        _started(os.getpid())


def vector_instructions() -> cpu_vec_isa.VecISA:
    """Those for which Inductor generates code.  Waits for the search, which is not made for two threads."""
    if _strongest_is_taken():
        _started(os.getpid()).wait()
    return cpu_vec_isa.pick_vec_isa()


@functools.cache
def _started(process: int) -> threading.Event:
    """Start the thread of a process: a forked child has none.  The event is set when the instructions are found."""
    searched = threading.Event()
    context = contextvars.copy_context()  # Inductor's configuration may be part of it
    threading.Thread(target=context.run, args=(_run, searched), name="chunkflow-warm-up", daemon=True).start()
    return searched


def _run(searched: threading.Event) -> None:
    with contextlib.suppress(Exception):  # it recurs, and is reported, when Inductor needs the result
        try:
            if _has_strongest() or (remove_torn() and _has_strongest()):
                with config.patch({"cpp.vec_isa_ok": True}):  # the weaker ones, which are parts of it, need no search
                    cpu_vec_isa.valid_vec_isa_list()
        finally:
            searched.set()
        CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _KERNEL)  # its header: the kernel is not compiled


def _strongest_is_taken() -> bool:
    """Whether Inductor takes the first candidate that a probe finds, as nobody has chosen another."""
    return config.cpp.simdlen is None and config.cpp.vec_isa_ok is None and "ATEN_CPU_CAPABILITY" not in os.environ


def _has_strongest() -> bool:
    """Whether a probe finds the first candidate, now."""
    for isa in (candidates := _of_this_cpu()[:1]):
        for cls in type(isa).__mro__:  # they remember the answer
            for name in ("__bool__", "_VecISA__bool__impl"):
                getattr(vars(cls).get(name), "cache_clear", lambda: None)()
    return any(candidates)


def _of_this_cpu() -> list[cpu_vec_isa.VecISA]:
    flags = cpu_vec_isa.x86_isa_checker()
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in flags for flag in str(isa).split())]
