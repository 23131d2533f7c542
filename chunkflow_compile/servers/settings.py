"""What the user of a server has set in the environment, and whether the plug-in knows the server's release."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.units import parse_bytes

MEMORY = "CHUNKFLOW_MEMORY"
OPTIONS = "CHUNKFLOW_OPTIONS"
PORT = "CHUNKFLOW_METRICS_PORT"
_EXAMPLE = 'such as {"lowering": "eager"}'

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Settings:
    """``memory``: most weight bytes of one transformer on the device, such as "12GiB".  ``options``: other options of the
    backend.  ``port``: at which rank 0 serves metrics, and each other rank at its number above; None for none."""

    memory: str
    options: Mapping[str, object]
    port: int | None = None


def settings_from(environ: Mapping[str, str]) -> Settings | None:
    """The settings in an environment; None where ``CHUNKFLOW_MEMORY`` is not set or empty.

    ``CHUNKFLOW_OPTIONS``: a JSON object of further options, such as ``{"lowering": "eager"}``.
    ``CHUNKFLOW_METRICS_PORT``: a port for Prometheus.  Raises ChunkflowError that names the variable for a memory that is no
    size, for options that are no JSON object or that the backend does not have, and for what is no port.
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
    from chunkflow_compile.options import parse_options  # imports torch, which a server without settings may not want

    try:
        parse_options({**options, "memory": memory})
    except ChunkflowError as error:
        raise ChunkflowError(f"{OPTIONS}: {error}") from error
    return Settings(memory, options, _port(environ.get(PORT, "").strip()))


def _port(text: str) -> int | None:
    if not text:
        return None
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ChunkflowError(f"{PORT}={text!r} is no port: give a number from 1 to 65535, such as 9400.")
    return int(text)


def known_release(distribution: str, oldest: str, before: str) -> bool:
    """Whether the installed release of a server is at least ``oldest`` and below ``before``; warns if it is not."""
    installed = version(distribution)
    if _numbers(oldest) <= _numbers(installed) < _numbers(before):
        return True
    _log.warning(
        "This is %s %s, and the plug-in of ChunkFlow knows %s up to below %s: it does nothing, and no weights stream. "
        "Install such a release, or unset %s.",
        distribution,
        installed,
        oldest,
        before,
        MEMORY,
    )
    return False


def _numbers(release: str) -> tuple[int, ...]:
    """(0, 5, 23) of ``0.5.23.post1``."""
    numbers = re.match(r"\d+(\.\d+)*", release)
    return tuple(int(n) for n in numbers[0].split(".")) if numbers else ()
