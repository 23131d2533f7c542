"""Hardware: the rates of compute, copies and collectives on the machine of a rank, for the cost model.  A profile is
immutable, and is stored as JSON."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from chunkflow_compile.units import RATES

from .errors import ChunkflowError

SCHEMA = 2


@dataclass(frozen=True, kw_only=True)
class LinkEmulation:
    """An emulated interconnect, for measurements on a machine that lacks the real one.  Transfers take as long as on
    the real interconnect.

    ``bandwidth``: bytes/s into a rank.  ``latency_s``: seconds from a transfer's last byte to its completion.
    ``quantum``: bytes that a transfer sends before the next transfer gets its turn.  ``order``: "fair" (round-robin) or
    "fifo".  ``shared``: path of a file through which all ranks of the machine share one port; empty if each rank has
    its own port.  ``drive``: bytes/s of an emulated SSD, or 0 to use the machine's SSD.  ``peers``: bytes/s of a second
    port, like NVLink, into a rank from all other ranks; pulls and collectives use this port.  0 if there is no second
    port.
    """

    bandwidth: float
    latency_s: float = 0.0
    quantum: int = 256 << 10
    order: str = "fair"
    shared: str = ""
    drive: float = 0.0
    peers: float = 0.0

    def __post_init__(self) -> None:
        _check_number("link_emulation.drive", self.drive, 0, 1e12)
        _check_number("link_emulation.peers", self.peers, 0, 1e13)
        _check_number("link_emulation.bandwidth", self.bandwidth, 1e5, 1e13)
        _check_number("link_emulation.latency_s", self.latency_s, 0, 1)
        _check_number("link_emulation.quantum", self.quantum, 256, 1 << 30)
        if self.order not in ("fair", "fifo"):
            raise ChunkflowError(f"Hardware field link_emulation.order must be fair or fifo, not {self.order!r}.")
        _check_text("link_emulation.shared", self.shared)


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The machine of one rank.  All rates are per rank.  ``sources``: the origin of each field's value."""

    name: str
    gemm_flops: Mapping[str, float]
    """Measured FLOP/s of large square GEMMs by dtype ("bfloat16", "float16", "float32")."""
    eta_gemm: float
    """Share (above 0 and at most 1) of gemm_flops that the GEMMs and convolutions of a model reach."""
    memory_bandwidth: float
    """Bytes/s between the device and its own memory."""
    h2d_bandwidth: float
    """Peak bytes/s of the interconnect from the host to this device.  Copies reach the share eta_pref of it."""
    eta_pref: float
    """Share (above 0 and at most 1) of h2d_bandwidth that long copies reach."""
    launch_s: float
    """Seconds of overhead per region."""
    chunk_s: float
    """Seconds of overhead per chunk copied."""
    collective_latency_s: float
    """Seconds of overhead per collective."""
    collective_bandwidth: float
    """Bytes/s that a collective moves into one rank while nothing else uses the interconnect."""
    shared_link: bool
    """Whether copies and collectives share one interconnect: true for PCIe, false if collectives use NVLink."""
    copy_slowdown: float
    """Factor, at least 1, by which a collective in flight stretches a copy; 1 if shared_link is false."""
    collective_slowdown: float
    """Factor, at least 1, by which a copy in flight stretches a collective; 1 if shared_link is false."""
    compute_slowdown: float = 1.0
    """Factor, at least 1, by which a copy in flight stretches compute and the latency of collectives: the copy uses
    memory bandwidth and, on a CPU, core time."""
    attention_slowdown: float = 2.0
    """Factor, at least 1, by which attention and a concurrent collective stretch each other: the kernels of NCCL occupy
    multiprocessors and memory bandwidth.  With the default of 2, overlapping them saves no time."""
    attention_flops: Mapping[str, float] = field(default_factory=dict)
    """FLOP/s of attention in 16-bit dtypes, by kernel: "cudnn", "fa3", "fa2", "efficient" or "cpu"."""
    attention: str = ""
    """The attention kernel, a key of attention_flops.  In a new profile, it is the kernel that torch uses on this
    machine.  If empty, attention runs at the rate of GEMMs."""
    eta_masked: float = 1.0
    """Share (above 0 and at most 1) of the attention rate that attention with a mask reaches."""
    eta_memory: float = 1.0
    """Share (above 0 and at most 1) of memory_bandwidth that kernels reach."""
    cache_bytes: int = 0
    """Size of the device's last-level cache in bytes; 0 to ignore the cache."""
    cache_bandwidth: float = 1e13
    """Bytes/s between the device and its last-level cache."""
    multiprocessors: int = 0
    """Streaming multiprocessors, or compute units, of the device; 0 if unknown, as for a CPU.  A GEMM runs in waves; in
    each wave, every multiprocessor computes one tile."""
    kernel_s: float = 0.0
    """Seconds from the end of a kernel to the start of the next one."""
    node_ranks: int = 0
    """Number of ranks per node; 0 if all ranks are on one node.  Ranks on different nodes exchange data over the
    network between nodes."""
    node_bandwidth: float = 25e9
    """Bytes/s that a collective moves into one rank from other nodes; 25 GB/s is 200 Gbit/s InfiniBand per rank."""
    node_latency_s: float = 1e-5
    """Seconds of overhead per collective between nodes, in addition to collective_latency_s."""
    drive_bandwidth: float = 2e9
    """Bytes/s that this rank reads from the SSD, for weights that exceed host_memory; 2 GB/s is typical of an NVMe
    SSD."""
    peer_bandwidth: float = 0.0
    """Bytes/s that a rank pulls from the devices of all other ranks on its machine together, over the interconnect that
    collectives use, while all ranks pull.  0 if a rank cannot read these devices, or reads them no faster than host
    memory."""
    pull_slowdown: float = 2.0
    """Factor, at least 1, by which a collective in flight stretches a pull."""
    collective_pull_slowdown: float = 2.0
    """Factor, at least 1, by which a pull in flight stretches a collective."""
    compute_pull_slowdown: float = 1.0
    """Factor, at least 1, by which pulls stretch compute and the latency of collectives while all ranks pull: this rank
    pulls, and other ranks pull from its device."""
    host_bandwidth: float = 0.0
    """Bytes/s that all ranks of a machine together read from host memory; 0 if no limit is known.  See
    :meth:`shared_by`."""
    pageable_bandwidth: float = 8.4e9
    """Bytes/s of a copy to the device from host memory that is not pinned.  The default was measured on the host of an
    H200, the faster of two measured hosts (docs/benchmarks/h200_card.json)."""
    new_pages_bandwidth: float = 2.1e9
    """Bytes/s at which the host writes newly allocated pages of 4 KiB, for example in a copy from the device to a new
    tensor.  The default was measured on the host of an H200."""
    cards: tuple[str, ...] = ()
    """Names of the GPUs that this profile describes, as their drivers report them."""
    memory_bytes: int = 0
    """Size of the device's memory in bytes, from its data sheet or its driver; 0 if unknown, as for a CPU.  Plans
    depend on the budget, not on this field."""
    sources: Mapping[str, str] = field(default_factory=dict)
    link_emulation: LinkEmulation | None = None
    """The interconnect to emulate while programs run, or None to use the real interconnect."""

    def __post_init__(self) -> None:
        _check_text("name", self.name)
        _check_text("attention", self.attention)
        if not isinstance(self.cards, tuple) or not all(isinstance(card, str) for card in self.cards):
            cards = list(self.cards) if isinstance(self.cards, tuple) else self.cards
            raise ChunkflowError(f"Hardware field cards must be a list of names of cards, not {cards!r}.")
        if not isinstance(self.sources, Mapping) or not all(isinstance(text, str) for text in self.sources.values()):
            raise ChunkflowError(
                f"Hardware field sources must map fields to where their figures come from, not {self.sources!r}."
            )
        for name, (low, high) in _RANGES.items():
            _check_number(name, getattr(self, name), low, high)
        for name in ("host_bandwidth", "peer_bandwidth"):
            if getattr(self, name) != 0:  # 0 means that there is no such rate
                _check_number(name, getattr(self, name), *_RANGES["h2d_bandwidth"])
        for name, kind, example in (("gemm_flops", "dtypes", "bfloat16"), ("attention_flops", "kernels", "fa2")):
            rates = getattr(self, name)
            if not isinstance(rates, Mapping) or (name == "gemm_flops" and not rates):
                raise ChunkflowError(f"Hardware field {name} must map {kind} to FLOP/s, like {{{example!r}: 600e12}}.")
            for key, rate in rates.items():
                _check_number(f"{name}[{key!r}]", rate, 1e8, 1e17)
        if self.attention and self.attention not in self.attention_flops:
            close = difflib.get_close_matches(self.attention, self.attention_flops, n=1, cutoff=0.0)
            raise ChunkflowError(
                f"{self.name} has no attention by {self.attention}: it has {', '.join(self.attention_flops) or 'no rate'}"
                f"{f', of which {close[0]} is the nearest' if len(self.attention_flops) > 1 else ''}."
            )
        if not isinstance(self.shared_link, bool):
            raise ChunkflowError(f"Hardware field shared_link must be true or false, not {self.shared_link!r}.")
        if not self.shared_link and (self.copy_slowdown != 1 or self.collective_slowdown != 1):
            raise ChunkflowError(
                "Hardware fields copy_slowdown and collective_slowdown must be 1 where shared_link is false."
            )

    def flops(self, dtype: str) -> float:
        """Return the FLOP/s that the GEMMs of a model reach.  For a dtype that the profile does not list, use the slowest
        listed rate."""
        return self.eta_gemm * self._gemm(dtype)

    def attention_rate(self, dtype: str) -> float:
        """Return the FLOP/s of attention in ``dtype``.  If GEMMs in ``dtype`` are slower than GEMMs in the fastest
        dtype, attention is slower by the same factor."""
        if not self.attention:
            return self.flops(dtype)
        slower = min(1.0, self._gemm(dtype) / max(self.gemm_flops.values()))
        return slower * self.attention_flops[self.attention]

    def attending_by(self, kernel: str) -> Hardware:
        """Return this machine with ``kernel`` as its attention kernel.  Raises ChunkflowError if there is no rate for the
        kernel.

        With FlashAttention, ``eta_masked`` does not apply: FlashAttention does not support masks, so models that use it
        pack their sequences instead.
        """
        masked = 1.0 if kernel in ("fa2", "fa3") else self.eta_masked
        return dataclasses.replace(self, attention=kernel, eta_masked=masked)

    def _gemm(self, dtype: str) -> float:
        return self.gemm_flops.get(dtype, min(self.gemm_flops.values()))

    def rate_of(self, nbytes: int) -> float:
        """Return the bytes/s at which a kernel writes a tensor of ``nbytes`` bytes and the next kernel reads it.

        A tensor of at most half the size of the cache is assumed to be in the cache.  The other half is assumed to hold
        the other tensors of the kernel.
        """
        return max(self.memory_rate, self.cache_bandwidth) if 2 * nbytes <= self.cache_bytes else self.memory_rate

    @property
    def memory_rate(self) -> float:
        """Bytes/s at which kernels read and write device memory."""
        return self.eta_memory * self.memory_bandwidth

    def crossing_seconds(self, nbytes: int, ranks: int) -> float:
        """Return the seconds, without latency, in which this rank receives ``nbytes`` bytes in a collective of
        ``ranks`` ranks.

        Each of the other ranks sends an equal part of these bytes.  Transfers within the node and transfers between
        nodes run at the same time.
        """
        if not self.node_ranks or ranks <= self.node_ranks:
            return nbytes / self.collective_bandwidth
        outside = nbytes * (ranks - self.node_ranks) / (ranks - 1)
        return max((nbytes - outside) / self.collective_bandwidth, outside / self.node_bandwidth)

    def latency_s(self, ranks: int) -> float:
        """Return the overhead of a collective of ``ranks`` ranks, in seconds."""
        return self.collective_latency_s + (self.node_latency_s if 0 < self.node_ranks < ranks else 0.0)

    @property
    def copy_rate(self) -> float:
        """Bytes/s of a long copy from host memory while nothing else uses the interconnect."""
        return self.eta_pref * self.h2d_bandwidth

    def rate_during_pulls(self, ranks: int) -> float:
        """Return the bytes/s of copies from host memory while all ``ranks`` ranks copy and pull; 0 if copies and pulls
        use the same interconnect."""
        return 0.0 if self.shared_link else self.shared_by(ranks).copy_rate

    def pull_seconds(self, nbytes: int, from_others: int, chunks: int) -> float:
        """Return the seconds for pulling chunks of a sharded weight while nothing else uses the interconnect.
        ``nbytes``: size of all chunks in bytes.  ``from_others``: number of these bytes that come from other ranks.
        ``chunks``: number of chunks.

        The bytes of this rank's own shard are copied within its device.  The overhead per chunk is ``chunk_s``.
        """
        own = 2 * (nbytes - from_others) / self.memory_rate
        return from_others / self.peer_bandwidth + own + chunks * self.chunk_s

    def check_peers(self, ranks: int) -> None:
        """Raise ChunkflowError if ``ranks`` ranks cannot read weights from each other's devices."""
        if why := self.why_no_peers(ranks):
            raise ChunkflowError(f"peers=True keeps weights on the devices of all ranks, but {why} Leave out peers.")

    def why_no_peers(self, ranks: int) -> str:
        """Return a sentence that explains why ``ranks`` ranks cannot read weights from each other's devices; empty if
        they can."""
        if ranks < 2:
            return "there is one rank only, so there are no other devices: it takes a Ulysses degree of 2 or more."
        if not self.peer_bandwidth:
            return (
                f"{self.name} has no peer_bandwidth: its cards cannot read each other's memory, or no faster than that of "
                "the host."
            )
        if 0 < self.node_ranks < ranks:
            return f"the {ranks} ranks are on several machines, {self.node_ranks} on each, and pulls stay inside a machine."
        if self.peer_bandwidth <= (rate := self.shared_by(ranks).copy_rate):
            return (
                f"on {self.name} a rank pulls {self.peer_bandwidth / 1e9:.4g} GB/s from the others, and copies "
                f"{rate / 1e9:.4g} GB/s from host memory."
            )
        return ""

    def shared_by(self, ranks: int) -> Hardware:
        """Return this machine as one rank sees it while ``ranks`` ranks copy at the same time.  The ranks on the same machine
        share ``host_bandwidth`` equally, and the copy rate of a rank is at most its share."""
        here = min(ranks, self.node_ranks) if self.node_ranks else ranks
        if not self.host_bandwidth or self.copy_rate * here <= self.host_bandwidth:
            return self
        return dataclasses.replace(self, h2d_bandwidth=self.host_bandwidth / here, eta_pref=1.0, host_bandwidth=0.0)

    def to_json(self) -> str:
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self)}, indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> Hardware:
        """Read a profile.  Raises ChunkflowError, with the name of the field, if a field is missing, unknown, negative
        or out of range."""
        try:
            body: dict[str, Any] = json.loads(text)
            schema = body.pop("schema", SCHEMA)
        except (ValueError, AttributeError, TypeError) as error:
            raise ChunkflowError(f"This is not a hardware profile: {error}.") from error
        if schema != SCHEMA:
            raise ChunkflowError(
                f"The hardware profile has schema {schema!r}, this version reads {SCHEMA}, which tells GEMMs, attention and "
                "other kernels apart: run chunkflow calibrate again, or name a built-in profile."
            )
        fields = {f.name: f for f in dataclasses.fields(Hardware)}
        for name in body:
            if name not in fields:
                close = difflib.get_close_matches(name, list(fields), n=1, cutoff=0.0)[0]
                raise ChunkflowError(f"Unknown hardware field {name!r}; did you mean {close!r}?")
        missing = [
            n for n, f in fields.items() if n not in body and f.default is f.default_factory is dataclasses.MISSING
        ]
        if missing:
            raise ChunkflowError(f"The hardware profile lacks {', '.join(missing)}.")
        if (link := body.get("link_emulation")) is not None:
            if not isinstance(link, dict):
                raise ChunkflowError(f"Hardware field link_emulation must map fields to figures, not {link!r}.")
            try:
                body["link_emulation"] = LinkEmulation(**link)
            except TypeError as error:
                raise ChunkflowError(f"Hardware field link_emulation is not valid: {error}.") from error
        if isinstance(body.get("cards"), list):
            body["cards"] = tuple(body["cards"])
        return Hardware(**body)


# The valid range of each field.  No real machine has a value outside these ranges: such a value is in the wrong unit (GB
# instead of bytes, ms instead of seconds).
_RANGES: Mapping[str, tuple[float, float]] = {
    "eta_gemm": (0.001, 1),
    "eta_memory": (0.01, 1),
    "eta_masked": (0.01, 1),
    "kernel_s": (0, 0.01),
    "cache_bytes": (0, 1e10),
    "multiprocessors": (0, 10_000),
    "memory_bytes": (0, 1e13),
    "cache_bandwidth": (1e8, 1e15),
    "memory_bandwidth": (1e8, 1e14),
    "h2d_bandwidth": (1e6, 1e13),
    "eta_pref": (0.01, 1),
    "launch_s": (0, 0.1),
    "chunk_s": (0, 0.1),
    "collective_latency_s": (0, 1),
    "collective_bandwidth": (1e5, 1e13),
    "copy_slowdown": (1, 100),
    "collective_slowdown": (1, 100),
    "compute_slowdown": (1, 100),
    "attention_slowdown": (1, 100),
    "pull_slowdown": (1, 100),
    "collective_pull_slowdown": (1, 100),
    "compute_pull_slowdown": (1, 100),
    "drive_bandwidth": RATES,
    "pageable_bandwidth": RATES,
    "new_pages_bandwidth": RATES,
    "node_ranks": (0, 1024),
    "node_bandwidth": (1e5, 1e13),
    "node_latency_s": (0, 1),
}


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise ChunkflowError(f"Hardware field {name} must be text, not {value!r}.")


def _check_number(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise ChunkflowError(f"Hardware field {name} must be a number, not {value!r}.")
    if not low <= value <= high:
        raise ChunkflowError(
            f"Hardware field {name}={value} is outside {low:g} .. {high:g}: units are bytes, seconds and FLOP/s."
        )
