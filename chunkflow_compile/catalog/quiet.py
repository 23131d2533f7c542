"""Suppression of the messages that libraries log when they are first imported."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# diffusers and transformers import torchao wherever it is installed. torchao then reports the kernels that were not built
# for this torch, torch reports functions that torchao should not call, and diffusers reports names that torchao lacks.
_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """A context that drops the warnings of these loggers, because no command's result depends on them.  Errors are kept."""

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
    """Let diffusers, if it is installed, log errors only: warnings about missing GPUs do not belong in a table."""
    with contextlib.suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
