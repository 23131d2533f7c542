"""Serves the metrics of models placed by a plug-in to Prometheus, on a separate port for each rank.

The ``/metrics`` endpoint of the server cannot be used: it reads files of prometheus_client's multiprocess mode, to which
custom collectors do not write.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch.distributed as dist
from torch import nn

from chunkflow_compile.pipeline.metrics import Metrics, library, metrics


class Scrape:
    """A metrics server.  ``port``: the port of rank 0, to which every other rank adds its rank; None to serve no metrics."""

    def __init__(self, port: int | None) -> None:
        self.port = port
        self._models: list[weakref.ref[nn.Module]] = []
        self._registry: Any = None
        self._collector: Metrics | None = None

    def add(self, model: nn.Module) -> None:
        """Serve the metrics of one more model, from its first call on.  Raises ChunkflowError if prometheus_client is not
        installed, and OSError if the port is in use."""
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
