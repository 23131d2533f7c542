"""``metrics``: Prometheus metrics for placed models.  When Prometheus scrapes the metrics, they are computed from counts that
the programs of a model always keep."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Any

import torch.distributed as dist
from torch import nn

from chunkflow_compile.hardware.machine import install_line
from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.pipeline.budget import budget_of
from chunkflow_compile.pipeline.components import components_of
from chunkflow_compile.placed.model_arguments import instead_of_model, is_pipeline, unwrap
from chunkflow_compile.placed.placement import Placement, placement_of
from chunkflow_compile.runtime.arena import Arena
from chunkflow_compile.weights.counts import Counts
from chunkflow_compile.weights.locks import ProcessLock

# The maximum number of retries if a read fails because another thread has changed a list or dict during the iteration.
_TRIES = 5

# Name of a counter, without the suffix that Prometheus adds -> the description of the counter, and a function that computes
# its value from a model's counts.
_COUNTERS: Mapping[str, tuple[str, Callable[[Counts], float]]] = {
    "chunkflow_calls": ("Calls of compiled programs", lambda c: c.calls),
    "chunkflow_call_predicted_seconds": ("Predicted time of the measured calls", lambda c: c.predicted_s),
    "chunkflow_stall_seconds": ("Time that compute waited for weights in the measured calls", lambda c: c.stalled_s),
    "chunkflow_collective_seconds": ("Time of collectives in the measured calls", lambda c: c.collective_s),
    "chunkflow_moved_bytes": ("Bytes of weights copied to the device", lambda c: c.moved_bytes),
    "chunkflow_fetched_bytes": ("Bytes of weights copied for ops outside programs", lambda c: c.fetched_bytes),
    "chunkflow_cold_starts": ("Calls that first fetched what a warm one finds", lambda c: c.cold_starts),
    "chunkflow_off_cycle_calls": ("Calls out of the order that was planned", lambda c: c.off_cycle),
    "chunkflow_graph_launches": ("Calls that were launched as one CUDA graph", lambda c: c.launches),
    "chunkflow_graph_captures": ("CUDA graphs that were recorded", lambda c: c.captures),
    "chunkflow_graph_capture_seconds": ("Time of recording CUDA graphs", lambda c: c.capture_s),
    "chunkflow_row_hits": ("Calls that found their hoisted values in the table", lambda c: c.row_hits),
    "chunkflow_row_misses": ("Calls that had their hoisted values computed first", lambda c: c.row_misses),
    "chunkflow_row_fill_seconds": ("Time of computing hoisted values", lambda c: c.row_fill_s),
    "chunkflow_programs": ("Programs made: first calls, new sizes, other plans", lambda c: c.programs),
}
_CALL = "chunkflow_call_seconds", "Time of the measured calls"
_GAUGES = {
    "chunkflow_device_bytes": "Bytes on the device: the arena, shared by models with one name, and resident weights",
    "chunkflow_graph_bytes": "Bytes on the device that CUDA graphs hold, their activations included, between calls too",
    "chunkflow_row_bytes": "Bytes on the device of the table of hoisted values",
    "chunkflow_pinned_bytes": "Bytes of pinned weights in host memory",
    "chunkflow_host_bytes": "Bytes of weights in host memory",
    "chunkflow_drive_bytes": "Bytes of weights on the drive",
    "chunkflow_budget_bytes": "Bytes that the plans of the model, or its pipeline, may take on the device",
}


@dataclass(eq=False)
class _Watched:
    """A model with metrics.

    ``name``: the label of the model.  ``root``: a weak reference to the model.  ``counts``: the counts of all placements of
    the model so far, oldest first.
    """

    name: str
    root: weakref.ref[nn.Module]
    counts: list[Counts]

    def placements(self) -> list[Placement]:
        """Return the placements of the model and its parts; an empty list if the model is restored or no longer exists."""
        root = self.root()
        return [] if root is None else [p for m in root.modules() if (p := placement_of(m)) is not None]

    def sums(self, placements: Iterable[Placement]) -> list[Counts]:
        """Return the counts of the current placements and of all earlier placements of the model.

        Earlier placements are included so that counters do not decrease when the model is placed again.
        """
        self.counts += [p.store.counts for p in placements if p.store.counts not in self.counts]
        return self.counts


class Metrics:
    """A collector for prometheus_client.  Models that are restored or no longer exist have no values."""

    def __init__(self, owners: Iterable[Any], registry: Any, library: Any) -> None:
        self._owners = [weakref.ref(unwrap(o) if isinstance(o, nn.Module) else o) for o in owners]
        self._watched: list[_Watched] = []
        self._registry = registry
        self._library = library
        self._lock = ProcessLock()  # held during a scrape

    def unregister(self) -> None:
        """Remove the collector from its registry."""
        self._registry.unregister(self)

    def describe(self) -> list[Any]:
        """Return the metric families without values.  prometheus_client calls this method when it registers the collector."""
        return [*self._families().values()]

    def collect(self) -> list[Any]:
        """Return the metric families with the current values, without waiting for calls of models or for a device."""
        families, taken = self._families(), set[Arena]()
        rank = str(dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0")))
        with self._lock():
            for watched in self._present():
                placements = _undisturbed(watched.placements)
                if not placements:
                    continue
                labels, counts = [watched.name, rank], watched.sums(placements)
                for name, (_, figure) in _COUNTERS.items():
                    families[name].add_metric(labels, sum(map(figure, counts)))
                calls, seconds = sum(c.measured for c in counts), sum(c.measured_s for c in counts)
                families[_CALL[0]].add_metric(labels, count_value=calls, sum_value=seconds)
                for name, value in self._gauges(watched, placements, taken).items():
                    families[name].add_metric(labels, value)
        return [*families.values()]

    def _families(self) -> dict[str, Any]:
        core, labels = self._library, ("model", "rank")
        counters = {name: core.CounterMetricFamily(name, text, labels=labels) for name, (text, _) in _COUNTERS.items()}
        gauges = {name: core.GaugeMetricFamily(name, text, labels=labels) for name, text in _GAUGES.items()}
        return {**counters, _CALL[0]: core.SummaryMetricFamily(*_CALL, labels=labels), **gauges}

    def _present(self) -> list[_Watched]:
        """Return the models that metrics are collected for, including the current components of the pipelines."""
        names: dict[nn.Module, str] = {}
        for owner in (o for ref in self._owners if (o := ref()) is not None):
            for name, model in _undisturbed(partial(models_of, owner)).items():
                names.setdefault(model, name)
        watched = {root: w for w in self._watched if (root := w.root()) is not None}
        for model, name in names.items():
            if model not in watched:
                taken = {w.name for w in watched.values()}
                numbered = (f"{name}-{number}" for number in count(2))
                free = next(label for label in chain([name], numbered) if label not in taken)
                watched[model] = _Watched(free, weakref.ref(model), [])
        self._watched = [*watched.values()]
        return [w for root, w in watched.items() if root in names]

    def _gauges(self, watched: _Watched, placements: list[Placement], taken: set[Arena]) -> dict[str, float]:
        """Return a mapping from the name of each gauge to its value for one model.

        ``taken``: the arenas that were already counted for other models.  The arenas of this model are added to ``taken``.
        """
        programs = [program for p in placements for program in [*p.programs] if not program.closed]
        arenas = {program.arena for program in programs} - taken
        taken |= arenas
        buffers = [b for p in placements for b in p.store.buffers]
        figures: dict[str, float] = {
            "chunkflow_device_bytes": sum(_undisturbed(partial(getattr, arena, "held")) for arena in arenas),
            "chunkflow_graph_bytes": sum(arena.graphs.nbytes for arena in arenas),
            "chunkflow_row_bytes": sum(placement.row_bytes for placement in placements),
            "chunkflow_pinned_bytes": sum(b.nbytes for b in buffers if b.pinned),
            "chunkflow_host_bytes": sum(b.nbytes for b in buffers if not b.source.file),
            "chunkflow_drive_bytes": sum(b.nbytes for b in buffers if b.source.file),
        }
        budgets = [program.variant.settings.goal.memory for program in programs if not program.preamble]
        if (budget := budget_of(watched.root())) is not None:
            figures["chunkflow_budget_bytes"] = budget.total
        elif budgets and None not in budgets:
            figures["chunkflow_budget_bytes"] = max(nbytes for nbytes in budgets if nbytes is not None)
        return figures


def metrics(*pipes_or_models: Any, registry: Any = None) -> Metrics:
    """Register a Prometheus collector for compiled pipelines and placed models; return it.

    The label of a component is its name in the pipeline.  The label of any other model is the name of its class.  If the
    label is already in use, a number is appended.
    ``registry``: a registry from prometheus_client; by default the global registry, which ``start_http_server`` serves.
    Raises ChunkflowError if prometheus_client is not installed, if ``registry`` is not a registry or already contains these
    metrics, or if an argument is neither a model nor a pipeline.
    """
    prometheus_client = library()
    for owner in pipes_or_models:
        models_of(owner)  # raises ChunkflowError if ``owner`` is neither a pipeline nor a model
    chosen = prometheus_client.REGISTRY if registry is None else registry
    if not hasattr(chosen, "register"):
        raise ChunkflowError(f"registry={registry!r} is no registry: pass a prometheus_client.CollectorRegistry.")
    collector = Metrics(pipes_or_models, chosen, prometheus_client.core)
    try:
        chosen.register(collector)
    except ValueError as error:  # a collector with the same metric names is already registered
        raise ChunkflowError(
            "This registry has the metrics of ChunkFlow already: pass all models in one call, or unregister() the first."
        ) from error
    return collector


def library() -> Any:
    """Import and return prometheus_client.  Raises ChunkflowError if it is not installed."""
    try:
        import prometheus_client.core
    except ImportError as error:
        raise ChunkflowError(f"Metrics need prometheus-client: {install_line('metrics')}.") from error
    return prometheus_client


def models_of(owner: Any) -> Mapping[str, nn.Module]:
    """Return a mapping from component names to the models of a pipeline.  For a single model, the mapping contains only this
    model, under the name of its class.

    Raises ChunkflowError if ``owner`` is neither a pipeline nor a model.
    """
    if isinstance(owner, nn.Module):
        return {type(unwrap(owner)).__name__: unwrap(owner)}
    if not is_pipeline(owner):
        raise ChunkflowError(instead_of_model(owner, or_pipeline=True))
    return {name: unwrap(model) for name, model in components_of(owner).items()}


def _undisturbed(read: Callable[[], Any]) -> Any:
    """Call ``read`` and return its result.  Retry if the call fails because another thread has changed a list or dict."""
    for _ in range(_TRIES):
        with contextlib.suppress(RuntimeError):
            return read()
    return read()
