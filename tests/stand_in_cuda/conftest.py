"""Fixtures of the tests that need the stand-in.  Elsewhere they are not collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from . import control

collect_ignore_glob = [] if control.active() else ["test_*.py"]


@pytest.fixture(autouse=True)
def as_new(no_grad: None) -> Iterator[None]:
    """No limits before a test, and none after it."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    yield
    control.set_device_broken(False)
    control.settings(**control.DEFAULTS)
