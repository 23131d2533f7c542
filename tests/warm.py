"""What takes seconds in every process that compiles a model, done once before processes are forked; starts no thread."""

from __future__ import annotations

import gc

import hypothesis  # noqa: F401
import pytest  # noqa: F401
import torch
from torch import nn
from tqdm import tqdm

import chunkflow_compile.frontend.backend  # noqa: F401
from chunkflow_compile.catalog.small import Size, small_model

torch._dynamo.guards.profile_guard_manager = lambda *_: 0.0  # as in conftest.py
tqdm.monitor_interval = 0  # no thread for progress bars: torch makes some
small_model("wan", Size(layers=1))  # imports diffusers
with torch.no_grad():
    torch.compile(nn.Linear(8, 8), backend="aot_eager")(torch.randn(4, 8))
torch._dynamo.reset()
gc.freeze()
