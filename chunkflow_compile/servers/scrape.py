"""The metrics of the models that a plug-in has placed, on a port of each rank's own, for Prometheus.

The servers' own ``/metrics`` reads files that collectors of other processes do not write.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from chunkflow_compile.pipeline.metrics import Metrics, library, metrics


class Scrape:
    """``port``: of rank 0, to which each rank adds its number; None for no metrics."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self._models: list[weakref.ref[nn.Module]] = []
        self._registry: Any = None
        self._collector: Metrics | None = None

    def add(self, model: nn.Module) -> None:
        """Serve what this model does too, from its first call on.  Raises ChunkflowError without prometheus_client, and
        OSError for a port that is taken."""
        if self.port is None:
            return
        self._models.append(weakref.ref(model))
        models = [live for ref in self._models if (live := ref()) is not None]
        if self._collector is None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._registry = library().CollectorRegistry()
            library().start_http_server(self.port + rank, registry=self._registry)
        else:
            self._collector.unregister()
        self._collector = metrics(*models, registry=self._registry)
