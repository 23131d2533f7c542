"""Problem: the regions, collectives and weights of one step, for which a plan is made.  A problem is immutable, and contains
no tensors."""

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
    """The place from which a weight is copied, and the form that it has there.  By default, a weight is in host memory and
    not compressed.

    ``file``: whether its bytes are in a file on the SSD.  ``values``: size of the uncompressed values in bytes if the
    weight is compressed (packing.py), otherwise 0.  ``ranks``: number of ranks over whose devices the weight is sharded
    (pieces.py); 0 if it is not sharded.

    The three fields are independent.  If the weight is compressed, its file and its shards contain compressed bytes.  A
    sharded weight is also kept in host memory or in the file: ops outside programs read the weight there, and so does a rank
    that has written to the weight.
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
        """Return the size in bytes of this rank's shard of a weight with ``nbytes`` bytes."""
        return piece_bytes(nbytes, self.ranks) if self.sharded else 0


# The source of a weight that is in host memory and not compressed.
HOST = Source()


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter that is an input of the Dynamo graph.

    ``index``: position among the inputs of the Dynamo graph.  ``names``: all names under which the model contains this tensor
    object; more than one for tied weights.  ``inside``: if the input is a tensor subclass that contains the parameter, the
    attribute path to it, such as ``.qdata``; otherwise empty.  ``keep``: why the parameter must stay on the device, or None
    if it may be streamed.  ``source``: in a Traced, the source at the time of tracing; in a Cut, the planned source.
    ``compressible``: False if the values of the parameter are known to be incompressible.
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
    """A parameter that the regions of a step read.  ``nbytes``: size in bytes; the compressed size if the weight is
    compressed.  ``uses``: indices of the regions that read it, ascending."""

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
    """The work of a region.  "Products" are GEMMs, convolutions and attention.

    ``flops``: FLOPs of all products; ``attention``: FLOPs of attention; ``masked``: FLOPs of attention with a mask.
    ``operands``: bytes that products read and write.  ``traffic``: memory traffic of the other kernels, as pairs: the
    size of a tensor in bytes, and the total bytes read and written in tensors of this size.  ``kernels``: number of
    kernels, including products.

    ``dtype`` and ``op``: dtype and op with the most FLOPs; ``op`` is "attention", "convolution", "matmul" or empty.
    ``tiles``: if the region runs once per slice, a pair for each GEMM (the number of its output tiles in one run, and its
    FLOPs in all runs); otherwise empty.  ``attention_tiles``: the same pair for each attention op that computes one group of
    heads.
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
        """Return the work of a region that runs ``times`` times."""
        traffic = tuple((size, moved * times) for size, moved in self.traffic)
        work = {name: getattr(self, name) * times for name in ("flops", "attention", "masked", "operands", "kernels")}
        return replace(self, traffic=traffic, **work)

    def seconds(self, hardware: Hardware) -> float:
        """Return the predicted time of the region in seconds.  The products take the time of their FLOPs or the time of the
        memory traffic of their operands, whichever is longer.  The times of all other kernels are added."""
        products = max(
            self.gemm_seconds(hardware) + self.attention_seconds(hardware), self.operands / hardware.memory_rate
        )
        others = sum(moved / hardware.rate_of(size) for size, moved in self.traffic)
        return products + self.idle_seconds(hardware) + others + self.kernels * hardware.kernel_s + hardware.launch_s

    def gemm_seconds(self, hardware: Hardware) -> float:
        """Return the seconds of the GEMMs and convolutions."""
        return (self.flops - self.attention) / hardware.flops(self.dtype)

    def idle_seconds(self, hardware: Hardware) -> float:
        """Return the seconds lost because some multiprocessors are idle in the last wave of each kernel in ``tiles`` and
        ``attention_tiles``.  The rates of GEMMs and of attention do not include this loss, because they are measured on
        kernels with many waves."""
        if not (count := hardware.multiprocessors):
            return 0.0

        def idle(kernels: tuple[tuple[int, int], ...]) -> float:
            return sum(flops * (-(-tiles // count) * count / tiles - 1) for tiles, flops in kernels)

        attention = idle(self.attention_tiles) / hardware.attention_rate(self.dtype) if self.attention_tiles else 0.0
        return idle(self.tiles) / hardware.flops(self.dtype) + attention

    def attention_seconds(self, hardware: Hardware) -> float:
        """Return the seconds of attention.  Attention with a mask runs at a lower rate."""
        flops = self.attention - self.masked + self.masked / hardware.eta_masked
        return flops / hardware.attention_rate(self.dtype)


@dataclass(frozen=True, kw_only=True)
class Region:
    """A part of the graph that is compiled as one piece; it contains no collective.  ``key``: digest of its structure;
    regions with equal keys are lowered once.

    ``block``: fully qualified name of its block, empty outside blocks.  ``weights``: weights in the order of the
    region's inputs.  ``repeat``: number of times that the region runs per step: once, or once per slice of its tokens
    (graph/split.py).  ``live``: peak bytes of live activations while it runs (cost/live.py).  ``groups``: number of groups of
    heads if the region computes the attention of one group (graph/head_groups.py), otherwise 1.
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
    """A collective.  ``nbytes``: bytes that this rank receives.  ``ranks``: size of its process group.

    ``before``: index of the first region after its start.  ``until``: index of the first region after compute has
    waited for the end of the collective.  If ``before`` or ``until`` equals the number of regions, it stands for the end of
    the step, after the last region.  ``engine``: whether kernels ("sm") or a copy engine ("copy") move its bytes; a busy copy
    engine cannot copy weights.
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
    """All properties of a model on which placement depends.  Window k opens before region k.

    ``ranks``: number of ranks that run the model at the same time, each on its part of the inputs.  These ranks share the
    bandwidth of host memory (:meth:`Hardware.shared_by`).
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
        """Bytes of the largest packed weight after it has been unpacked.  The device needs this memory in addition to the
        packed weights, because a region unpacks one weight at a time."""
        return max((w.source.values for w in self.weights), default=0)

    @property
    def exchange_groups(self) -> int:
        """The number of groups of heads into which the exchanges around attention are divided; 1 if they are not
        divided."""
        return max((r.groups for r in self.regions), default=1)

    @property
    def live_bytes(self) -> int:
        """The peak of live activations in bytes, without :attr:`unpacked_bytes`."""
        return max((r.live for r in self.regions), default=0)

    @property
    def piece_bytes(self) -> int:
        """Bytes of this rank's shards of weights, which are on its device under every plan."""
        return sum(w.source.shard_bytes(w.nbytes) for w in self.weights)

    @property
    def in_blocks(self) -> Problem:
        """The part of the problem that is inside blocks.  If the blocks of the model are compiled separately
        (compile_repeated_blocks), only this part is planned."""
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
        """The properties on which a placement depends, except for activation sizes.  Problems with equal structures can
        share a placement.

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
        """Sixteen hex digits that identify this problem.  Plans for the problem contain them.

        The digest covers the properties on which placement depends, but no properties that differ between traces of the
        same model.  So it does not cover the order of inputs, which changes when the model is offloaded, or the ops,
        which can depend on the device.  The digest does not cover the number of ranks either.
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
        # "drive", "packed" and "peers" are the former names of the fields of Source; the current names would change the
        # digests
        if drive := sorted(w.name for w in self.weights if w.source.file):
            body["drive"] = drive
        if packed := sorted(w.name for w in self.weights if w.source.compressed):
            body["packed"] = packed
        if peers := sorted((w.name, w.source.ranks) for w in self.weights if w.source.sharded):
            body["peers"] = peers
        return hashlib.sha256(json.dumps(body, separators=(",", ":")).encode()).hexdigest()[:16]

    @property
    def body(self) -> dict[str, Any]:
        """This problem as JSON-compatible values, for :meth:`from_body`."""
        return asdict(self)

    @staticmethod
    def from_body(body: Mapping[str, Any]) -> Problem:
        """Make a problem from a :attr:`body` that was read from JSON.  Raises KeyError, ValueError or TypeError if it is
        invalid."""
        return Problem(
            regions=tuple(_region(**r) for r in body["regions"]),
            collectives=tuple(Collective(**c) for c in body["collectives"]),
            weights=tuple(_weight(**w) for w in body["weights"]),
            ranks=body["ranks"],
        )


# The fields of a Weight that are tuples; JSON stores them as lists.
_TUPLES = ("names", "shape", "stride", "uses")
# The fields of a RegionCost that are tuples of pairs; JSON stores them as lists of lists.
_PAIRS = ("traffic", "tiles", "attention_tiles")


def _weight(*, source: Mapping[str, Any], **more: Any) -> Weight:
    return Weight(source=Source(**source), **{**more, **{name: tuple(more[name]) for name in _TUPLES}})


def _region(*, weights: list[str], cost: Mapping[str, Any], **more: Any) -> Region:
    pairs = {name: tuple((first, second) for first, second in cost.get(name, ())) for name in _PAIRS}
    return Region(weights=tuple(weights), cost=RegionCost(**{**cost, **pairs}), **more)
