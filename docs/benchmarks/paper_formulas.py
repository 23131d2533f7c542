"""The paper's formulas for the FLOPs of a block, and for the amount of compute that hides the copy of a block.

Source: arXiv 2605.11335, sections on the critical compute workload and its evaluation.  Units: FLOP, bytes, seconds;
B batch, S tokens of the latent, L tokens of the text, d width, f width of the MLP.  A multiply-add counts as two.  All
FLOP counts are over all ranks: divide by the sequence- or tensor-parallel degree for one rank.

The planner does not use these formulas; it counts the FLOPs of the traced graph.  The formulas serve for a comparison
with the paper, and tests compare them with traced graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from chunkflow_compile.passes.errors import ChunkflowError


def dit_block_flops(*, batch: int, tokens: float, text: int, width: int, mlp: int) -> float:
    """Return the FLOPs of a DiT block (Wan): self-attention 8BSd^2 + 4BS^2 d, cross-attention 4BSd^2 + 4BLd^2 + 4BSLd,
    MLP 4BSdf."""
    b, s, l, d, f = batch, tokens, text, width, mlp  # noqa: E741  (the formula's own letters)
    self_attention = 8 * b * s * d**2 + 4 * b * s**2 * d
    cross_attention = 4 * b * s * d**2 + 4 * b * l * d**2 + 4 * b * s * l * d
    return self_attention + cross_attention + 4 * b * s * d * f


def double_block_flops(*, batch: int, tokens: float, text: int, width: int, mlp: int) -> float:
    """Return the FLOPs of an MM-DiT double block: projections 8BSd^2 + 8BLd^2, joint attention 4B(S+L)^2 d, MLPs 4BSdf +
    4BLdf."""
    b, s, l, d, f = batch, tokens, text, width, mlp  # noqa: E741
    return 8 * b * (s + l) * d**2 + 4 * b * (s + l) ** 2 * d + 4 * b * (s + l) * d * f


def single_block_flops(*, batch: int, tokens: float, text: int, width: int, mlp: int) -> float:
    """Return the FLOPs of an MM-DiT single block: 2B(S+L)d(3d+f) + 4B(S+L)^2 d + 2B(S+L)(d+f)d."""
    b, n, d, f = batch, tokens + text, width, mlp
    return 2 * b * n * d * (3 * d + f) + 4 * b * n**2 * d + 2 * b * n * (d + f) * d


@dataclass(frozen=True, kw_only=True)
class BlockKind:
    """A block type.  ``count``: the number of blocks.  ``flops``, ``nbytes``: the FLOPs and the weight bytes of one
    block."""

    count: int
    flops: float
    nbytes: float


def mean_block(kinds: Sequence[BlockKind]) -> BlockKind:
    """Return the mean FLOPs and the mean bytes over all blocks of a model."""
    count = sum(k.count for k in kinds)
    return BlockKind(
        count=count,
        flops=sum(k.count * k.flops for k in kinds) / count,
        nbytes=sum(k.count * k.nbytes for k in kinds) / count,
    )


def critical_flops(*, peak: float, eta_comp: float, nbytes: float, h2d: float, eta_pref: float) -> float:
    """Return F* = eta_comp P_peak B_pref / (eta_pref BW_h2d), the FLOPs of one rank's block above which compute hides the
    copy of a block."""
    return eta_comp * peak * nbytes / (eta_pref * h2d)


def knee(*, peak: float, eta_comp: float, h2d: float, eta_pref: float) -> float:
    """Return I* = F* / B_pref in FLOP per byte, the knee of the roofline for copies to the device."""
    return eta_comp * peak / (eta_pref * h2d)


def chunk_seconds(*, chunk_bytes: float, h2d: float, eta_pref: float) -> float:
    """Return T_chunk = C / (eta_pref BW_h2d), the maximum time in seconds that a collective waits for a chunk."""
    return chunk_bytes / (eta_pref * h2d)


def critical_point(flops: Callable[[float], float], critical: float) -> float:
    """Return the size (frames or batch) at which one rank's block reaches ``critical`` FLOPs, to a relative error of
    1e-9.  ``flops``: a function from the size to FLOPs, which must increase.  Raises ChunkflowError if the size would
    exceed a million.
    """
    low, high = 0.0, 1.0
    while flops(high) < critical:
        low, high = high, 2 * high
        if high > 1e6:
            raise ChunkflowError(f"No size below a million reaches {critical:.3g} FLOP per block.")
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if flops(middle) < critical else (low, middle)
    return high
