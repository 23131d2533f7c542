"""What is to be scheduled: regions, collectives and weights of one step.  Frozen, and free of any tensor."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from .hardware import Hardware


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter at the Dynamo boundary, found by identity.

    ``index``: position among the inputs of the Dynamo graph.  ``names``: every name it has in the model; more than one
    for tied weights.  ``keep``: why it must stay on the device, or None if it may be streamed.
    """

    index: int
    names: tuple[str, ...]
    keep: str | None = None

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as the step sees it.  ``uses``: indices of the regions that read it, ascending."""

    name: str
    names: tuple[str, ...]
    index: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    uses: tuple[int, ...]
    keep: str | None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """``flops`` of GEMMs, convolutions and attention; ``nbytes`` through the device's memory; ``dtype`` and ``op`` of most
    FLOPs, ``op`` being "attention", "convolution", "matmul", or empty."""

    flops: int
    nbytes: int
    dtype: str
    op: str = ""

    def seconds(self, hardware: Hardware) -> float:
        """Roofline: the longer of compute at eta_comp of the peak and memory traffic, plus one launch."""
        compute = self.flops / hardware.flops(self.dtype)
        return max(compute, self.nbytes / hardware.memory_bandwidth) + hardware.launch_s


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of pure compute.  ``key``: digest of its structure; equal keys are lowered once.

    ``block``: fully qualified name of the block that it belongs to, empty outside blocks.  ``weights``: in the order in
    which the region takes them.
    """

    index: int
    name: str
    key: str
    block: str
    nodes: int
    weights: tuple[str, ...]
    cost: Cost


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective.  ``nbytes``: bytes that cross the link into this rank.

    ``before``: index of the region that runs next after it starts; ``until``: index of the region in front of which its
    completion is awaited; the number of regions if that is the end of the step.
    """

    name: str
    kind: str
    nbytes: int
    before: int
    until: int


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that placement may look at.  Windows are numbered like regions: window k opens before region k."""

    regions: tuple[Region, ...]
    collectives: tuple[Collective, ...]
    weights: tuple[Weight, ...]

    @property
    def total_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def digest(self) -> str:
        """Sixteen hex digits that tell this problem from every other; a plan carries them.

        Of what placement depends on and every way to trace the model agrees on: neither the order of its inputs, which
        changes when it is offloaded, nor the device's own ops.
        """
        body = {
            "regions": [(r.block, r.weights, r.cost.flops) for r in self.regions],
            "collectives": [(c.kind, c.nbytes, c.before, c.until) for c in self.collectives],
            "weights": sorted((w.name, w.nbytes, w.dtype, w.shape, w.uses, w.keep is None) for w in self.weights),
        }
        return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()[:16]
