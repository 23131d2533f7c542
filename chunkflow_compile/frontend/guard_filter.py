"""Which of Dynamo's guards a compiled block needs: those that others imply are left out, because every call pays for them."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkflow_compile.private_torch.dynamo import GuardFilterEntry
from chunkflow_compile.weights.host_weight import HostWeight

# Of a tensor whose class is in its TENSOR_MATCH too.
_OF_CLASS = ("TENSOR_SUBCLASS_METADATA_MATCH", "TYPE_MATCH")
_INSIDE = (".host", ".__tensor_flatten__()[0]")
_WITH_KWARGS = "_with_kwargs"
_OF_GRADIENTS = ("._backward_hooks", "._backward_pre_hooks")


def needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Whether each guard can fail where the others hold.  For ``guard_filter_fn`` of torch.compile.

    Left out are those on what is inside an offloaded weight, whose class, sizes, strides, dtype and device are guarded;
    on which hooks take keyword arguments, where it is guarded that there are no hooks; and, where gradients are off, which
    is guarded too, on hooks of gradients.
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
