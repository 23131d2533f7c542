"""The decision: where every weight lives, which slot it streams through, which window starts it.  Frozen, JSON."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from .errors import ChunkflowError

SCHEMA = 1
# Kernels assume 16-byte alignment of their inputs; 256 is what the CUDA allocator gives to every tensor.
ALIGNMENT = 256

Home = Literal["host", "device"]


def align(nbytes: int) -> int:
    """Bytes rounded up to :data:`ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, kw_only=True)
class WeightPlan:
    """One weight.  A streamed one has ``home="host"``, a slot at ``offset`` bytes into the arena and a window.

    ``window`` starts its chunks, in this step if ``window <= first_use`` and otherwise in the step before
    (wrap-around).  ``first_use`` and ``last_use`` are region indices.  ``why`` is a sentence for people.
    """

    name: str
    home: Home
    nbytes: int
    why: str
    offset: int | None = None
    window: int | None = None
    first_use: int | None = None
    last_use: int | None = None

    @property
    def wraps(self) -> bool:
        return self.window is not None and self.first_use is not None and self.window > self.first_use


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All weights of a program.  ``arena_bytes``: size of the device arena.  ``chunk_bytes``: longest single copy."""

    policy: str
    chunk_bytes: int
    arena_bytes: int
    windows: int
    weights: tuple[WeightPlan, ...]

    @property
    def streamed(self) -> tuple[WeightPlan, ...]:
        return tuple(w for w in self.weights if w.home == "host")

    @property
    def resident_bytes(self) -> int:
        return sum(w.nbytes for w in self.weights if w.home == "device")

    @property
    def device_bytes(self) -> int:
        """Weight bytes on the device: arena and residents."""
        return self.arena_bytes + self.resident_bytes

    @property
    def moved_bytes(self) -> int:
        """Bytes copied to the device in one step."""
        return sum(w.nbytes for w in self.streamed)

    def chunks(self, weight: WeightPlan) -> int:
        """Number of chunks of a weight."""
        return -(-weight.nbytes // self.chunk_bytes)

    def to_json(self) -> str:
        body = {"schema": SCHEMA, **asdict(self)}
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True) + "\n"

    @property
    def digest(self) -> str:
        return _digest({"schema": SCHEMA, **asdict(self)})

    @staticmethod
    def from_json(text: str) -> Plan:
        """Reads a plan; raises ChunkflowError on another schema or a digest that does not fit."""
        try:
            body: dict[str, Any] = json.loads(text)
            digest, schema = body.pop("digest"), body["schema"]
        except (ValueError, KeyError, AttributeError) as error:
            raise ChunkflowError(f"This is not a ChunkFlow plan: {error}.") from error
        if schema != SCHEMA:
            raise ChunkflowError(f"The plan has schema {schema}, this version reads {SCHEMA}: make the plan again.")
        if digest != _digest(body):
            raise ChunkflowError("The plan was edited after it was written (its digest does not fit): make it again.")
        del body["schema"]
        body["weights"] = tuple(WeightPlan(**w) for w in body["weights"])
        return Plan(**body)


def _digest(body: dict[str, Any]) -> str:
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
