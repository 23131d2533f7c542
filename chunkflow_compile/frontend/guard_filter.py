"""The guards of Dynamo that a compiled block needs.  Guards that others imply are dropped, because each costs time per
call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkflow_compile.private_torch.dynamo import GuardFilterEntry
from chunkflow_compile.weights.host_weight import HostWeight

# Guards on the class of a tensor, which its TENSOR_MATCH guard also checks.
_OF_CLASS = ("TENSOR_SUBCLASS_METADATA_MATCH", "TYPE_MATCH")
_INSIDE = (".host", ".__tensor_flatten__()[0]")
_WITH_KWARGS = "_with_kwargs"
_OF_GRADIENTS = ("._backward_hooks", "._backward_pre_hooks")


def needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Whether each guard can fail while all others hold; for the option ``guard_filter_fn`` of torch.compile.

    Three groups of guards are dropped.  Guards on the inside of an offloaded weight: its class, sizes, strides, dtype and
    device are guarded.  Guards on which hooks take keyword arguments, if there is a guard that there are no hooks.  And
    guards on gradient hooks if gradients are disabled, because the grad mode is guarded.
    """
    weights = {g.name for g in guards if g.has_value and isinstance(g.value, HostWeight)}
    without = {g.name for g in guards if g.has_value and isinstance(g.value, dict) and not g.value}
    gradients = torch.is_grad_enabled()

    def implied(guard: GuardFilterEntry) -> bool:
        name = guard.name
        if guard.guard_type in _OF_CLASS:
            return name in weights
        if any(name.endswith(end) and name.removesuffix(end) in weights for end in _INSIDE):
            return True
        if name.endswith(_WITH_KWARGS):
            return name in without and name.removesuffix(_WITH_KWARGS) in without
        return not gradients and name.endswith(_OF_GRADIENTS)

    return [not implied(guard) for guard in guards]
