"""Configurations of diffusers' step caches that skip work even in a short generation, for tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

STEP_CACHES = ("FirstBlockCache", "MagCache", "PyramidAttentionBroadcast", "FasterCache", "TaylorSeerCache")


def step_cache(name: str, timestep: Callable[[], int], steps: int) -> Any:
    """Return the configuration of a cache.  ``timestep``: a function that returns the timestep of the current step.
    ``steps``: the number of steps per generation.

    Caches that skip attention skip it at timesteps below 900.
    """
    import diffusers

    skipping = {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": (-1, 900),
        "current_timestep_callback": timestep,
    }
    arguments: Mapping[str, Mapping[str, Any]] = {
        "FirstBlockCache": {"threshold": 0.2},
        "MagCache": {
            "mag_ratios": torch.linspace(1.0, 0.9, steps),
            "num_inference_steps": steps,
            "retention_ratio": 0.1,
            "threshold": 0.5,
        },
        "PyramidAttentionBroadcast": skipping,
        "FasterCache": {**skipping, "attention_weight_callback": lambda _: 0.5, "is_guidance_distilled": True},
        "TaylorSeerCache": {
            "cache_interval": 3,
            "disable_cache_before_step": 2,
            "cache_identifiers": [r".*\.attn1?"],
        },
    }
    return getattr(diffusers, f"{name}Config")(**arguments[name])
