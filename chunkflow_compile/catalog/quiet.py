"""Silence for what libraries say of themselves when they are first imported."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

# torchao, which diffusers and transformers import wherever it is installed, says which of its kernels were not built for
# this torch; torch, which of its functions torchao should not call; and diffusers, which names of torchao it misses.
_LOGGERS = ("torchao", "torch.utils._pytree", "diffusers.quantizers.torchao.torchao_quantizer")


@contextlib.contextmanager
def quiet_imports() -> Iterator[None]:
    """Drop the warnings of these loggers meanwhile: no command's result depends on them.  Errors are kept."""

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
    """Let diffusers, where it is installed, log errors only: warnings about missing GPUs do not belong in a table."""
    with contextlib.suppress(ImportError):
        import diffusers

        diffusers.utils.logging.set_verbosity_error()
