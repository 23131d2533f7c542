"""Lets torch find the backend where the package is imported from its source tree, and is not installed.

torch finds backends by the entry points of installed distributions.  A source tree has none, so it stands for one: see
"Extending the search algorithm" in the documentation of importlib.metadata.  Imports nothing that takes time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import Distribution, DistributionFinder

BACKEND = "chunkflow"
DISTRIBUTION = "chunkflow-compile"
# As in pyproject.toml.
ENTRY_POINTS = "[torch_dynamo_backends]\nchunkflow = chunkflow_compile.frontend.backend:chunkflow\n"


class SourceTree:
    """On ``sys.meta_path``, after the finder of installed distributions, which is asked first."""

    @staticmethod
    def find_spec(*_: Any) -> None:
        """It finds no modules."""

    @staticmethod
    def find_distributions(context: DistributionFinder.Context) -> Iterable[Distribution]:
        from importlib.metadata import Distribution

        class Tree(Distribution):
            def read_text(self, filename: str) -> str | None:
                texts = {"METADATA": f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\n", "entry_points.txt": ENTRY_POINTS}
                return texts.get(filename)

            def locate_file(self, path: Any) -> Any:
                return Path(__file__).parent.parent.parent / path

        return [Tree()] if context.name in (None, DISTRIBUTION) else []


def show_backend() -> None:
    """Let torch find the backend, also if it has looked for backends already."""
    if not any(isinstance(finder, SourceTree) for finder in sys.meta_path):
        sys.meta_path.append(SourceTree())
    registry = sys.modules.get("torch._dynamo.backends.registry")
    if registry is not None and BACKEND not in registry.list_backends(None):
        registry.register_backend(_chunkflow, name=BACKEND)


def _chunkflow(graph: Any, inputs: Any, **given: Any) -> Any:
    from chunkflow_compile.frontend.backend import chunkflow

    return chunkflow(graph, inputs, **given)


_chunkflow.__name__ = BACKEND  # torch's errors have it
