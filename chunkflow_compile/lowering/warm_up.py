"""What Inductor does once in a process for the CPU, in threads beside the tracing.

It finds the vector instructions, and precompiles the header of its kernels.  With empty caches, both run the C++ compiler,
for 15 s on a slow core, and it does not hold the GIL.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch._inductor import config, cpu_vec_isa
from torch._inductor.codecache import CppPythonBindingsCodeCache

_log = logging.getLogger(__name__)

# Inductor ends a probe after 60 s, and then writes scalar code for the rest of the process.  On a machine under load, the
# next attempt finds the compiler's part done.
_PROBE_S, _ATTEMPTS = 60, 3

_KERNEL = 'extern "C" void kernel(float* out) {}'


def warm_up(device: torch.device) -> None:
    """Start it, once in a process, for a model on the CPU.  Must be called under Dynamo's compile lock."""
    if device.type == "cpu":
        _started()


def await_warm_up() -> None:
    """Wait for the search for vector instructions, if it was started: Inductor's own is not made for two threads."""
    if _started.cache_info().currsize:
        _started().join()


@functools.cache
def _started() -> threading.Thread:
    thread = threading.Thread(
        target=contextvars.copy_context().run, args=(_run,), name="chunkflow-warm-up", daemon=True
    )
    thread.start()
    return thread


def _run() -> None:
    with contextlib.suppress(Exception):  # a failure recurs, and is reported, when Inductor needs the result
        find_vector_instructions()
    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(_precompile,), name="chunkflow-precompile", daemon=True).start()


def _precompile() -> None:
    with contextlib.suppress(Exception):  # as above
        CppPythonBindingsCodeCache.load_pybinding_async(["float*"], _KERNEL)  # its header; the kernel is not compiled


def find_vector_instructions() -> None:
    """Let Inductor find the vector instructions, again if a probe ran into its time limit."""
    for _ in range(_ATTEMPTS):
        start, candidates = time.perf_counter(), _of_this_cpu()
        first = candidates[:1] if _strongest_is_taken() else []
        if any(first):
            _take_strongest()
            return
        complete = _probed(candidates[len(first) :]) and not first
        if complete or time.perf_counter() - start < _PROBE_S:
            return
        _forget()
    _log.warning(
        "Inductor's probes for vector instructions ran into their time limit %d times: it generates code for %s. "
        "Start again on a machine with less load.",
        _ATTEMPTS,
        cpu_vec_isa.pick_vec_isa(),
    )


def take_vector_instructions(name: str) -> None:
    """Let Inductor take those that another process has found, without a probe if they are the strongest."""
    if _strongest_is_taken() and [str(isa) for isa in _of_this_cpu()[:1]] == [name]:
        _take_strongest()
    else:
        find_vector_instructions()


def _take_strongest() -> None:
    with config.patch({"cpp.vec_isa_ok": True}):  # the weaker ones are parts of it, and are not taken
        cpu_vec_isa.valid_vec_isa_list()


def _probed(candidates: Sequence[cpu_vec_isa.VecISA]) -> bool:
    """Probe all of them at once; Inductor keeps the results.  Return whether all are found."""
    contexts = [contextvars.copy_context() for _ in candidates]  # Inductor's configuration may be part of a context
    with ThreadPoolExecutor() as pool:
        return all(list(pool.map(lambda context, isa: context.run(bool, isa), contexts, candidates)))


def _strongest_is_taken() -> bool:
    """Whether Inductor takes the first candidate that a probe finds, as nobody has chosen another."""
    return config.cpp.simdlen is None and config.cpp.vec_isa_ok is None and "ATEN_CPU_CAPABILITY" not in os.environ


def _of_this_cpu() -> list[cpu_vec_isa.VecISA]:
    known = cpu_vec_isa.x86_isa_checker()
    return [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in known for flag in str(isa).split())]


def _forget() -> None:
    for cls in (cpu_vec_isa.VecISA, *(type(isa) for isa in cpu_vec_isa.supported_vec_isa_list)):
        for name in ("__bool__", "_VecISA__bool__impl"):
            clear = getattr(vars(cls).get(name), "cache_clear", None)
            if clear is not None:
                clear()
