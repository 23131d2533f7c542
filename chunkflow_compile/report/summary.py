"""The five lines at the start of a report by ``explain``: step, stalls, device memory, host memory, and advice."""

from __future__ import annotations

from dataclasses import astuple, dataclass

from chunkflow_compile.units import size

# Reports ignore stalls and other parts of a step that take less than this share of the step time, because the times of steps
# vary by about as much.
NOTABLE = 0.02
_LABELS = ("step", "stalls", "device memory", "host memory", "to go faster")


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The five lines of a report, one text per line, in their order."""

    step: str
    stalls: str
    device: str
    host: str
    faster: str

    def __str__(self) -> str:
        width = max(map(len, _LABELS)) + 3
        return "\n".join(f"{label + ':':<{width}}{text}" for label, text in zip(_LABELS, astuple(self), strict=True))


def advice(
    *,
    step_s: float,
    waited_s: float,
    moved_bytes: int,
    budget: int,
    weight_bytes: int,
    host_s: float = 0.0,
    collective_s: float = 0.0,
) -> str:
    """Return advice on how to make steps faster.

    ``step_s``: the duration of a step in seconds.  ``waited_s``, ``host_s``, ``collective_s``: the seconds per step in which
    compute waits for weights, for the host, and for collectives.  ``moved_bytes``: the number of bytes that are copied to the
    device per step.  ``budget``: the budget of device memory in bytes.  ``weight_bytes``: the size of all weights in bytes.
    """
    parts = {"weights": waited_s, "host": host_s, "collectives": collective_s}
    name = max(parts, key=parts.__getitem__)
    if not step_s or parts[name] < NOTABLE * step_s:
        why = "all copies overlap with compute" if moved_bytes else "nothing is copied in a step"
        return f"{why}: compute is the limit, and more memory would not help"
    if name == "weights":
        memory = (
            f"more memory than {size(budget)} (all weights: {size(weight_bytes)}), " if budget < weight_bytes else ""
        )
        return f"{memory}pack=True, or quantised weights"
    if name == "host":
        return "the host launches work more slowly than it runs: cudagraphs=True (on a GPU), or larger inputs"
    return "collectives are the limit: fewer ranks, or a faster link between the GPUs"
