"""Reads the settings of a plug-in from environment variables, and checks the release of the server."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, get_args

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.passes.names import OnPeers
from chunkflow_compile.units import parse_bytes

if TYPE_CHECKING:
    import torch
    from torch import nn

    from chunkflow_compile.options import Options

MEMORY = "CHUNKFLOW_MEMORY"
OPTIONS = "CHUNKFLOW_OPTIONS"
PORT = "CHUNKFLOW_METRICS_PORT"
IGNORE_VERSION = "CHUNKFLOW_IGNORE_VERSION"
_EXAMPLE = 'such as {"lowering": "eager"}'

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PluginSettings:
    """The settings of a plug-in.  ``memory``: limit for the weights and activations of one transformer on the device, such
    as "12GiB".

    ``options``: other options of the backend.  ``port``: the port on which rank 0 serves metrics, to which every other rank
    adds its rank; None to serve no metrics.  ``peers``: as in ``offload``, for the default process group, which contains all
    ranks of the server.  ``ignore_version``: whether to accept an unsupported release of the server."""

    memory: str
    options: Mapping[str, Any]
    port: int | None = None
    peers: OnPeers = False
    ignore_version: bool = False

    def place(self, model: nn.Module, device: torch.device | None) -> nn.Module:
        """Offload a transformer and return it.  ``device``: device to run on; by default, the device of its weights.  With
        ``peers``, all ranks must call this.

        Raises ChunkflowError like ``offload``, and with ``peers`` also if the hardware profile says that ranks cannot read
        each other's GPU memory.
        """
        from chunkflow_compile.frontend.compile import refuse_no_peers
        from chunkflow_compile.placed.offload import offload, target_of

        chosen = _parsed(memory=self.memory, **self.options)
        if self.peers:
            refuse_no_peers(self.peers, None, target_of(model, device), chosen)
        return offload(model, device, min_bytes=chosen.min_bytes, peers=self.peers)

    def check_release(self, distribution: str, oldest: str, before: str) -> None:
        """Check the installed release of a server.  Raises ChunkflowError if it is older than ``oldest`` or not older than
        ``before``; with ``ignore_version``, logs a warning instead."""
        installed = version(distribution)
        if _numbers(oldest) <= _numbers(installed) < _numbers(before):
            return
        supported = f"versions from {oldest} to below {before}"
        found = f"This is {distribution} {installed}, and ChunkFlow's plug-in supports {supported}"
        if not self.ignore_version:
            raise ChunkflowError(
                f"{found}. Install a supported version, unset {MEMORY} to serve without streaming, or set "
                f"{IGNORE_VERSION}=1 to try this one."
            )
        _log.warning("%s: %s=1 uses it all the same.", found, IGNORE_VERSION)


def settings_from(environ: Mapping[str, str]) -> PluginSettings | None:
    """Return the settings in an environment; None if ``CHUNKFLOW_MEMORY`` is unset or empty.

    ``CHUNKFLOW_OPTIONS``: a JSON object with further options, such as ``{"lowering": "eager"}``, and ``peers``.
    ``CHUNKFLOW_METRICS_PORT``: a port for Prometheus.  ``CHUNKFLOW_IGNORE_VERSION``: 1 to accept any release of the server.
    Raises ChunkflowError that names the variable if its value is invalid, or if an option is unknown.
    """
    memory = environ.get(MEMORY, "").strip()
    if not memory:
        return None
    parse_bytes(memory, MEMORY)
    try:
        options = json.loads(environ.get(OPTIONS) or "{}")
    except json.JSONDecodeError as error:
        raise ChunkflowError(f"{OPTIONS} is not JSON ({error}): give an object, {_EXAMPLE}.") from error
    if not isinstance(options, dict):
        raise ChunkflowError(f"{OPTIONS} is {json.dumps(options)}, and must be a JSON object: {_EXAMPLE}.")
    if "memory" in options:
        raise ChunkflowError(f"memory is in {MEMORY} and in {OPTIONS}: leave it out of {OPTIONS}.")
    try:
        _parsed(memory=memory, **options)
    except ChunkflowError as error:
        raise ChunkflowError(f"{OPTIONS}: {error}") from error
    peers = options.pop("peers", False)
    ignored = environ.get(IGNORE_VERSION, "").strip()
    if ignored not in ("", "0", "1"):
        raise ChunkflowError(f"{IGNORE_VERSION}={ignored!r} is neither 0 nor 1.")
    return PluginSettings(memory, options, _port(environ.get(PORT, "").strip()), peers, ignored == "1")


def _parsed(*, peers: OnPeers = False, **options: Any) -> Options:
    """Parse the options of the backend.  Raises ChunkflowError for unknown options and for invalid values."""
    # imported here, because it imports torch, which only a server with settings needs
    from chunkflow_compile.option_parsing import parse_options
    from chunkflow_compile.options import check_choice

    chosen = parse_options(options, caller=_parsed)
    check_choice("peers", peers, get_args(OnPeers))
    return chosen


def _port(text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ChunkflowError(f"{PORT}={text!r} is no port: give a number from 1 to 65535, such as 9400.")
    return int(text)


def _numbers(release: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a release: (0, 5, 23) for ``0.5.23.post1``."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
