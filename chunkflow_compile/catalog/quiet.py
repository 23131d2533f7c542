"""Suppress messages that libraries log when they are imported for the first time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# The loggers to silence.  diffusers and transformers import torchao if it is installed.  torchao then reports kernels that
# were not built for this torch, torch reports that torchao calls private functions, and diffusers reports names that torchao
# lacks.
_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Return a context in which the loggers in ``_LOGGERS`` drop warnings, because no command's result depends on them.
    Errors are kept."""

    def keep(record: logging.LogRecord) -> bool:
        return record.levelno >= logging.ERROR

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addFilter(keep)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeFilter(keep)


def quiet_diffusers() -> None:
    """Make diffusers log only errors, so that no warnings about missing GPUs appear among tables.  Does nothing if
    diffusers is not installed."""
    with contextlib.suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
