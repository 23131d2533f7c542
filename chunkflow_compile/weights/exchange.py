"""In-place exchange of tensors: references to a parameter stay valid when its values move to the host and back."""

from __future__ import annotations

import gc
from collections import deque
from functools import partial

import torch

from chunkflow_compile.passes.errors import ChunkflowError
from chunkflow_compile.private_torch import core

# Attributes of a HostWeight that are exchanged together with its values.  All other attributes, such as attributes set
# by the user, stay with the tensor.
STATE = {"host", "buffer", "kind", "_is_param"}


def become(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the types, the values and the attributes of two tensors, so that every reference to ``tensor`` sees the
    content of ``other``.

    Works like torch.utils.swap_tensors, but also accepts tensors to which user code holds weak references in Python.
    Attributes that users have set on ``tensor`` stay on ``tensor``.  The exchange is one call into C, so Ctrl-C cannot
    interrupt it halfway.
    Raises ChunkflowError if the values cannot be swapped because C++ code, such as torch's profiler, holds a weak
    reference to one of the tensors.
    """
    own = {name: value for name, value in tensor.__dict__.items() if name not in STATE}
    theirs = {**own, **other.__dict__}
    mine, kinds = dict(tensor.__dict__), (type(tensor), type(other))
    steps = (
        partial(core.swap_values, tensor, other),
        partial(setattr, tensor, "__class__", kinds[1]),
        partial(setattr, other, "__class__", kinds[0]),
        partial(setattr, tensor, "__dict__", theirs),
        partial(setattr, other, "__dict__", mine),
    )
    try:
        try:
            deque(map(partial.__call__, steps), maxlen=0)
        except RuntimeError:  # the first step failed, perhaps because garbage still holds a weak reference
            gc.collect()
            deque(map(partial.__call__, steps), maxlen=0)
    except RuntimeError as error:
        raise ChunkflowError(
            f"A weight of shape {list(tensor.shape)} cannot be moved, because something refers to it weakly ({error}), as a "
            "profile with record_shapes, profile_memory or with_stack does that has recorded an op on it. Delete the profile "
            "first, and place and restore the model outside of one."
        ) from error
