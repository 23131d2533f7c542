"""Stages for torch's own tools: ``trace_structured`` for tlparse, a ``chunkflow`` artefact for torch's logs.

torch reads TORCH_LOGS when it is imported, and then only its own artefacts are registered.  The environment variable
therefore takes the name of this package, ``TORCH_LOGS=chunkflow_compile``; ``set_logs`` takes ``chunkflow``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from torch._logging import _internal

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import STAGES
from chunkflow_compile.passes.pipeline import Stage

from .lines import stage_lines
from .listings import render
from .stages import annotator

ARTEFACT = "chunkflow"
PACKAGE = "chunkflow_compile"


def logged(run: Iterable[Stage], hardware: Hardware) -> Iterator[Stage]:
    """Yield the stages.  The listing of each is written to the structured trace and, annotated and folded, to the log."""
    log, start = _logger(), time.perf_counter()
    for stage in run:
        seconds = time.perf_counter() - start
        name = f"chunkflow_{STAGES.index(stage.name):02}_{stage.name}"
        _artifact(name, "string", lambda stage=stage: render(stage_lines(stage)))  # type: ignore[misc]
        if stage.name == "planned" and stage.plan is not None:
            _artifact("chunkflow_plan", "json", stage.plan.to_json)
        if _asked_for(log):
            listing = render(stage_lines(stage), annotator(stage, hardware), full=False)
            log.info("%s, %.2f s:\n%s", stage.name, seconds, listing)
        yield stage
        start = time.perf_counter()


def _asked_for(log: logging.Logger) -> bool:
    """Whether the listings were asked for.  A server that logs everything at INFO, through the root logger, has not asked
    for them."""
    return log.isEnabledFor(logging.INFO) and any(logging.getLogger(name).level for name in (PACKAGE, log.name))


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # there is no trace id on the command line
    )


def _logger() -> logging.Logger:
    if ARTEFACT not in _internal.log_registry.artifact_names:
        _internal.register_artifact(ARTEFACT, "Stages of ChunkFlow's compilation, annotated.", visible=True)
    if not _internal.log_registry.is_log(PACKAGE):
        _internal.log_registry.register_log(PACKAGE, PACKAGE)  # set_logs adds handlers to registered logs only
    return _internal.getArtifactLogger(PACKAGE, ARTEFACT)
