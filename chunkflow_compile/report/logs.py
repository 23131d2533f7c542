"""Stages where torch's own tools look: ``trace_structured`` for tlparse, a ``chunkflow`` artefact for torch's logs.

torch reads TORCH_LOGS while it is imported, when it knows no artefact but its own: in the environment the artefact goes
by the name of this package, ``TORCH_LOGS=chunkflow_compile``; ``set_logs`` knows it as ``chunkflow``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from torch._logging import _internal

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.pipeline import STAGES, Stage

from .lines import stage_lines
from .listings import render
from .stages import annotator

ARTEFACT = "chunkflow"
PACKAGE = "chunkflow_compile"


def logged(
    run: Iterable[Stage], hardware: Hardware, took: Callable[[Stage, float], None] | None = None
) -> Iterator[Stage]:
    """Passes the stages on, each with its listing in the structured trace and, annotated and folded, in the log.

    ``took`` is told the seconds of each stage.
    """
    log = _logger()
    for stage, seconds in _timed(run):
        if took is not None:
            took(stage, seconds)
        name = f"chunkflow_{STAGES.index(stage.name):02}_{stage.name}"
        _artifact(name, "string", lambda stage=stage: render(stage_lines(stage)))  # type: ignore[misc]
        if stage.name == "planned" and stage.plan is not None:
            _artifact("chunkflow_plan", "json", stage.plan.to_json)
        if log.isEnabledFor(logging.INFO):
            log.info(
                "%s, %.2f s:\n%s",
                stage.name,
                seconds,
                render(stage_lines(stage), annotator(stage, hardware), full=False),
            )
        yield stage


def _timed(run: Iterable[Stage]) -> Iterator[tuple[Stage, float]]:
    """Each stage with the seconds that it took."""
    coming = iter(run)
    while True:
        start = time.perf_counter()
        stage = next(coming, None)
        if stage is None:
            return
        yield stage, time.perf_counter() - start


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # the command line has none
    )


def _logger() -> logging.Logger:
    if ARTEFACT not in _internal.log_registry.artifact_names:
        _internal.register_artifact(ARTEFACT, "Stages of ChunkFlow's compilation, annotated.", visible=True)
    if not _internal.log_registry.is_log(PACKAGE):
        _internal.log_registry.register_log(PACKAGE, PACKAGE)  # set_logs gives handlers to registered logs alone
    return _internal.getArtifactLogger(PACKAGE, ARTEFACT)
