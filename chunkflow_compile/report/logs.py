"""Pass the compilation stages to torch's own tools: to tlparse with ``trace_structured``, and to torch's logs as the artefact
``chunkflow``.

torch reads the environment variable TORCH_LOGS while torch is imported.  At that time, the artefact ``chunkflow`` is not
registered yet.  Therefore users set this variable to the name of the package: ``TORCH_LOGS=chunkflow_compile``.  They pass
the name of the artefact, ``chunkflow``, to torch's function ``set_logs``.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator

from torch._logging import _internal

from chunkflow_compile.passes.hardware import Hardware
from chunkflow_compile.passes.names import STAGES
from chunkflow_compile.passes.pass_pipeline import Stage

from .lines import stage_lines
from .listings import render
from .stages import annotator

ARTEFACT = "chunkflow"
PACKAGE = "chunkflow_compile"


def logged(run: Iterable[Stage], hardware: Hardware) -> Iterator[Stage]:
    """Yield the stages, and write a listing of each stage to the structured trace and to the log.

    The listing in the log is annotated and folded, and is written only if the user has requested these logs.
    """
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
    """Whether the user has requested listings by setting the level of this package's logger or of the artefact's logger.

    Listings are not requested if only the root logger has the level INFO, as in many servers.
    """
    return log.isEnabledFor(logging.INFO) and any(logging.getLogger(name).level for name in (PACKAGE, log.name))


def _artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    _internal.trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,  # in runs of the command-line program, there is no trace id
    )


def _logger() -> logging.Logger:
    if ARTEFACT not in _internal.log_registry.artifact_names:
        _internal.register_artifact(ARTEFACT, "Stages of ChunkFlow's compilation, annotated.", visible=True)
    if not _internal.log_registry.is_log(PACKAGE):
        _internal.log_registry.register_log(PACKAGE, PACKAGE)  # set_logs adds handlers to registered logs only
    return _internal.getArtifactLogger(PACKAGE, ARTEFACT)
