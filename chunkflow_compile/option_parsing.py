"""Parses the arguments of the public functions and the options of torch.compile into :class:`Options`."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import Any

import torch

from chunkflow_compile.options import ALIASES, Options
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import is_size, parse_bytes

# The options in bytes that may also be given as strings such as "64MiB".
_SIZES = ("min_bytes", "chunk_bytes", "group_bytes")

# The settings of torch that ChunkFlow does not support, each with the reason that the error message gives.  If one of these
# settings is on, weights are not inputs of the graph, or ChunkFlow cannot match the inputs to weights and blocks.
_REFUSED_SETTINGS: Mapping[str, str] = {
    "torch._dynamo.config.install_free_tensors": "makes weights attributes of the graph, where they cannot be streamed",
    "torch._dynamo.config.use_graph_deduplication": "makes equal parts of the graph calls of one function, in which blocks "
    "cannot be told apart; ChunkFlow compiles equal regions once in any case",
    "torch._dynamo.config.verify_correctness": "runs the graph on copies of the weights, which are in no host store",
    "torch._functorch.config.selective_decompose": "removes what says which input of the graph is which weight",
}


def parse_options(
    options: Mapping[str, Any] | None,
    mode: str | None = None,
    caller: Callable[..., Any] | None = None,
    refused: Collection[str] = (),
) -> Options:
    """Check the options of the backend and return them.

    ``mode``: the mode of torch.compile; its Inductor settings apply to all regions.  ``caller``: the function that takes the
    options as ``**options``, or None.  ``refused``: the names of options that ``caller`` does not support.
    Raises ChunkflowError for an unknown option, and for a setting of torch that ChunkFlow does not support.  For an unknown
    option, the message suggests the most similar option, or the most similar named argument of ``caller``.
    """
    _check_settings()
    given = dict(options or {})
    own = () if caller is None else inspect.signature(caller).parameters.values()
    names = [p.name for p in own if p.default is not p.empty]
    names += [name for f in fields(Options) if (name := ALIASES.get(f.name, f.name)) not in (*names, *refused)]
    for key in given:
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1, cutoff=0.0)
            raise ChunkflowError(f"Unknown option {key!r}; did you mean {close[0]!r}? Options are {', '.join(names)}.")
    own_inductor = given.pop("inductor", None) or {}
    if not isinstance(own_inductor, Mapping):
        raise ChunkflowError(f"Option inductor={own_inductor!r} must be a dict of settings of Inductor.")
    of_mode = _mode_options(mode)
    if of_mode.pop("triton.cudagraphs", False):
        given.setdefault("cudagraphs", True)
    inductor = {**of_mode, **own_inductor}
    _check_inductor(inductor)
    for field_name, name in ALIASES.items():
        if name in given:
            given[field_name] = given.pop(name)
    for name in _SIZES:
        if isinstance(given.get(name), str | float):
            given[name] = parse_bytes(given[name], name)
    return Options(**given, inductor=inductor)


def refuse_positional(caller: Callable[..., Any], given: Sequence[object]) -> None:
    """Raise ChunkflowError if ``caller`` got positional arguments.  The message suggests names for these arguments.

    ``given``: the positional arguments after the first one.
    """
    if not given:
        return
    value = given[0]
    named = dict(value) if isinstance(value, Mapping) else {}
    if not named:
        name = "dtype" if isinstance(value, torch.dtype) else "memory" if is_size(value) else "device"
        named = {name: value}
    meant = ", ".join(f"{name}={one!r}" for name, one in named.items())
    raise ChunkflowError(f"{caller.__name__} takes all arguments but the first by name; did you mean {meant}?")


def for_backend(options: Mapping[str, Any], chosen: Options) -> dict[str, Any]:
    """Convert the options of ``compile`` to options for the backend.  The backend gets no mode, so this function adds the
    settings of the mode to the options.

    ``chosen``: the result of :func:`parse_options` for ``options`` and the mode.
    """
    of_mode = {"inductor": chosen.inductor, "cudagraphs": chosen.cudagraphs}
    return {**options, **{name: value for name, value in of_mode.items() if value}}


def _check_settings() -> None:
    """Raise ChunkflowError if a setting of torch that ChunkFlow does not support is on."""
    for setting, why in _REFUSED_SETTINGS.items():
        module, _, name = setting.rpartition(".")
        if getattr(import_module(module), name, False):  # some releases of torch do not have this setting
            raise ChunkflowError(f"{setting} {why}: set it to False, its default.")


def _mode_options(mode: str | None) -> dict[str, Any]:
    if mode is None or mode == "default":
        return {}
    from chunkflow_compile.private_torch.inductor import list_mode_options

    modes = list_mode_options()
    if mode not in modes:
        raise ChunkflowError(f"Unknown mode {mode!r}; use one of {', '.join(modes)}.")
    return dict(modes[mode])


def _check_inductor(inductor: Mapping[str, Any]) -> None:
    # imported here because the import takes a second, and only compilation needs it
    from chunkflow_compile.private_torch.inductor import config

    settings = config.get_config_copy()
    for key in inductor:
        if key.replace("-", "_") not in settings:
            close = difflib.get_close_matches(key, list(settings), n=1, cutoff=0.0)
            raise ChunkflowError(f"Unknown Inductor option {key!r} in options['inductor']; did you mean {close[0]!r}?")
    if inductor.get("triton.cudagraphs", config.triton.cudagraphs):
        raise ChunkflowError(
            "Inductor's CUDA graphs copy region inputs to addresses of their own, which would double the streamed weights: "
            "leave triton.cudagraphs off, and set the option cudagraphs=True, which records the whole call."
        )
    if inductor.get("freezing", config.freezing):
        raise ChunkflowError(
            "Inductor freezing turns weights into constants of the compiled code, so they could not be streamed; set "
            "torch._inductor.config.freezing = False (environment TORCHINDUCTOR_FREEZING=0)."
        )
