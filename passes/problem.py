"""Problem: the regions, collectives and weights of one step, to be scheduled.  Frozen; holds no tensors."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from .hardware import Hardware
from .names import Lane
from .pieces import piece_bytes


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the copies of a weight come from, and in which form.  By default from host memory, as its values.

    ``file``: whether its bytes are in a file on the SSD.  ``values``: bytes of its values if it is compressed (packing.py),
    else 0.  ``ranks``: the number of ranks across whose devices it is sharded (pieces.py), else 0.

    All combinations occur: the bytes in the file and in the shards are those of the form, and a sharded weight keeps its
    bytes in host memory or in the file for ops outside programs and for a rank that writes it.
    """

    file: bool = False
    values: int = 0
    ranks: int = 0

    @property
    def compressed(self) -> bool:
        return self.values > 0

    @property
    def sharded(self) -> bool:
        return self.ranks > 0

    @property
    def reads_file(self) -> bool:
        """Whether each copy reads the file first."""
        return self.file and not self.sharded

    @property
    def lane(self) -> Lane:
        return "pull" if self.sharded else "copy"

    def shard_bytes(self, nbytes: int) -> int:
        """Bytes of this rank's shard of a weight of ``nbytes``."""
        return piece_bytes(nbytes, self.ranks) if self.sharded else 0


# Host memory, not compressed.
HOST = Source()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """One parameter at the Dynamo boundary, found by identity.

    ``index``: position among the inputs of the Dynamo graph.  ``names``: every name it has in the model; more than one
    for tied weights.  ``inside``: where it is in that input, if that is a tensor subclass, such as
    ``.qdata``.  ``keep``: why it must stay on the device, or None if it may be streamed.  ``source``: what it is when the
    graph is traced; in a cut, what it is planned to be.  ``compressible``: whether it is compressed or can be, as far as is
    known.
    """

    index: int
    names: tuple[str, ...]
    keep: str | None = None
    inside: str = ""
    source: Source = HOST
    compressible: bool = True

    @property
    def key(self) -> tuple[int, str]:
        return self.index, self.inside

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter as the step sees it.  ``nbytes``: what is stored and copied.  ``uses``: indices of the regions that read
    it, ascending."""

    name: str
    names: tuple[str, ...]
    index: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    uses: tuple[int, ...]
    keep: str | None
    source: Source = HOST


@dataclass(frozen=True, kw_only=True)
class RegionCost:
    """The work of a region.  ``flops``: of its products, which are GEMMs, convolutions and attention; ``attention``: those of
    attention among them, and ``masked``: those of attention with a mask.  ``operands``: bytes that products read and write.
    ``traffic``: of the other kernels, by the size of a tensor, the bytes that they read and write of tensors of that size.
    ``kernels``: how many there are, with products.

    ``dtype`` and ``op``: those of most FLOPs; ``op`` is "attention", "convolution", "matmul" or empty.
    ``tiles``: of each GEMM of a region that runs on slices, the tiles of a call, and the FLOPs of all calls.
    ``attention_tiles``: the same of each attention of a group of heads.
    """

    flops: int
    dtype: str
    op: str = ""
    attention: int = 0
    masked: int = 0
    operands: int = 0
    traffic: tuple[tuple[int, int], ...] = ()
    kernels: int = 0
    tiles: tuple[tuple[int, int], ...] = ()
    attention_tiles: tuple[tuple[int, int], ...] = ()

    def repeated(self, times: int) -> RegionCost:
        """The work of a region that runs several times in a row."""
        traffic = tuple((size, moved * times) for size, moved in self.traffic)
        work = {name: getattr(self, name) * times for name in ("flops", "attention", "masked", "operands", "kernels")}
        return replace(self, traffic=traffic, **work)

    def seconds(self, hardware: Hardware) -> float:
        """Products take the longer of their FLOPs and of their operands; the other kernels run after them, one by one."""
        products = max(
            self.gemm_seconds(hardware) + self.attention_seconds(hardware), self.operands / hardware.memory_rate
        )
        others = sum(moved / hardware.rate_of(size) for size, moved in self.traffic)
        return products + self.idle_seconds(hardware) + others + self.kernels * hardware.kernel_s + hardware.launch_s

    def gemm_seconds(self, hardware: Hardware) -> float:
        """Of the GEMMs and convolutions among its products."""
        return (self.flops - self.attention) / hardware.flops(self.dtype)

    def idle_seconds(self, hardware: Hardware) -> float:
        """Of the last waves of ``tiles`` and ``attention_tiles``, in which some multiprocessors have none.  The rates of
        GEMMs and of attention are those of whole ones, which have many waves."""
        if not (count := hardware.multiprocessors):
            return 0.0

        def idle(kernels: tuple[tuple[int, int], ...]) -> float:
            return sum(flops * (-(-tiles // count) * count / tiles - 1) for tiles, flops in kernels)

        attention = idle(self.attention_tiles) / hardware.attention_rate(self.dtype) if self.attention_tiles else 0.0
        return idle(self.tiles) / hardware.flops(self.dtype) + attention

    def attention_seconds(self, hardware: Hardware) -> float:
        """Of the attention among its products; a mask makes it slower."""
        flops = self.attention - self.masked + self.masked / hardware.eta_masked
        return flops / hardware.attention_rate(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Region:
    """A piece of pure compute.  ``key``: digest of its structure; regions with equal keys are lowered once.

    ``block``: fully qualified name of its block, empty outside blocks.  ``weights``: in the order of the region's
    inputs.  ``repeat``: how often its code is called, once for each slice of its values (graph/split.py).  ``live``: most
    bytes of activations that are alive while it runs (cost/live.py).  ``groups``: if it computes attention of a group of
    heads, the number of groups (graph/head_groups.py), else 1.
    """

    index: int
    name: str
    key: str
    block: str
    nodes: int
    weights: tuple[str, ...]
    cost: RegionCost
    repeat: int = 1
    live: int = 0
    groups: int = 1


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective.  ``nbytes``: bytes that cross the link into this rank.  ``ranks``: of its process group.

    ``before``: index of the first region after its start.  ``until``: index of the region before which its completion
    is awaited.  Either is the number of regions if it lies after the last region.  ``engine``: what moves its bytes,
    kernels or a copy engine, which then copies no weights.
    """

    name: str
    kind: str
    nbytes: int
    before: int
    until: int
    ranks: int = 2
    engine: Literal["sm", "copy"] = "sm"


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Everything that placement reads of a model.  Window k opens before region k.

    ``ranks``: those that run it at the same time, each its part; what they share of a machine is in :class:`Hardware`.
    """

    regions: tuple[Region, ...]
    collectives: tuple[Collective, ...]
    weights: tuple[Weight, ...]
    ranks: int = 1

    @property
    def total_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights)

    @property
    def unpacked_bytes(self) -> int:
        """Most bytes of values that a region has unpacked at a time, beside the weights: one weight after the other."""
        return max((w.source.values for w in self.weights), default=0)

    @property
    def exchange_groups(self) -> int:
        """The number of groups of heads in which the exchanges around attention run; 1 if they are whole."""
        return max((r.groups for r in self.regions), default=1)

    @property
    def live_bytes(self) -> int:
        """Most bytes of activations that are alive at a time, without :attr:`unpacked_bytes`."""
        return max((r.live for r in self.regions), default=0)

    @property
    def piece_bytes(self) -> int:
        """Bytes of this rank's pieces of weights, which its device holds whatever the plan does."""
        return sum(w.source.shard_bytes(w.nbytes) for w in self.weights)

    @property
    def in_blocks(self) -> Problem:
        """The part inside blocks, which is what runs if each block is compiled on its own (compile_repeated_blocks)."""
        inside = [r.index for r in self.regions if r.block]
        index = {old: new for new, old in enumerate(inside)}
        regions = tuple(replace(self.regions[old], index=new, name=f"region_{new}") for old, new in index.items())
        uses = {w.name: tuple(index[use] for use in w.uses if use in index) for w in self.weights}
        weights = tuple(replace(w, uses=uses[w.name]) for w in self.weights if uses[w.name])
        collectives = tuple(
            replace(c, before=index[c.before], until=next((index[k] for k in inside if k >= c.until), len(inside)))
            for c in self.collectives
            if c.before in index
        )
        return replace(self, regions=regions, collectives=collectives, weights=weights)

    @property
    def structure(self) -> object:
        """What a placement depends on, without the sizes of activations: problems with equal ones can share a placement.

        The order of weights is left out, because it changes when the model is offloaded.
        """
        regions = tuple((r.block, frozenset(r.weights)) for r in self.regions)
        collectives = tuple((c.kind, c.before, c.until, c.engine) for c in self.collectives)
        weights = frozenset(
            (w.name, w.nbytes, w.uses, w.keep is None, w.source.file, w.source.ranks) for w in self.weights
        )
        return regions, collectives, weights

    @property
    def digest(self) -> str:
        """Sixteen hex digits that identify this problem; a plan carries them.

        They cover what placement depends on, as far as it is the same however the model is traced.  The order of
        inputs, which changes when the model is offloaded, and ops specific to a device are left out.  So are the ranks:
        those of a program are known where it runs.
        """
        body: dict[str, object] = {
            "regions": [(r.block, r.weights, r.cost.flops) for r in self.regions],
            "collectives": [(c.kind, c.nbytes, c.before, c.until) for c in self.collectives],
            "weights": sorted((w.name, w.nbytes, w.dtype, w.shape, w.uses, w.keep is None) for w in self.weights),
        }
        if any(r.repeat > 1 for r in self.regions):
            body["repeats"] = [r.repeat for r in self.regions]
        if engines := [i for i, c in enumerate(self.collectives) if c.engine == "copy"]:
            body["engines"] = engines
        # the keys from before there was a source: a digest stays what it was
        if drive := sorted(w.name for w in self.weights if w.source.file):
            body["drive"] = drive
        if packed := sorted(w.name for w in self.weights if w.source.compressed):
            body["packed"] = packed
        if peers := sorted((w.name, w.source.ranks) for w in self.weights if w.source.sharded):
            body["peers"] = peers
        return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()[:16]

    @property
    def body(self) -> dict[str, Any]:
        """This problem in JSON's types, for :meth:`from_body`."""
        return asdict(self)

    @staticmethod
    def from_body(body: Mapping[str, Any]) -> Problem:
        """The problem of a :attr:`body` that was written as JSON.  Raises KeyError, ValueError or TypeError if it is none."""
        return Problem(
            regions=tuple(_region(**r) for r in body["regions"]),
            collectives=tuple(Collective(**c) for c in body["collectives"]),
            weights=tuple(_weight(**w) for w in body["weights"]),
            ranks=body["ranks"],
        )


# Fields of a weight that are tuples, which JSON has as lists.
_TUPLES = ("names", "shape", "stride", "uses")


# Fields of a cost that are tuples of pairs.
_PAIRS = ("traffic", "tiles", "attention_tiles")


def _weight(*, source: Mapping[str, Any], **more: Any) -> Weight:
    return Weight(source=Source(**source), **{**more, **{name: tuple(more[name]) for name in _TUPLES}})


def _region(*, weights: list[str], cost: Mapping[str, Any], **more: Any) -> Region:
    pairs = {name: tuple((first, second) for first, second in cost.get(name, ())) for name in _PAIRS}
    return Region(weights=tuple(weights), cost=RegionCost(**{**cost, **pairs}), **more)
