"""Selects the Dynamo guards that a compiled block needs.

Guards that other guards imply are dropped, because each guard costs time in every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chunkflow_compile.private_torch.dynamo import GuardFilterEntry
from chunkflow_compile.weights.host_weight import HostWeight

# The types of guards that check only the class of a tensor.  A guard of type TENSOR_MATCH on the same tensor also checks the
# class.
_OF_CLASS = ("TENSOR_SUBCLASS_METADATA_MATCH", "TYPE_MATCH")
_INSIDE = (".host", ".__tensor_flatten__()[0]")
_WITH_KWARGS = "_with_kwargs"
_OF_GRADIENTS = ("._backward_hooks", "._backward_pre_hooks")


def needed(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Return, for each guard, whether to keep it.  This function is passed to torch.compile as ``guard_filter_fn``.

    A guard is not needed if, as long as all other guards hold, it cannot fail or its failure would not matter.  There are
    four groups of such guards:
    - Guards on the class of an offloaded weight: another guard on this weight, TENSOR_MATCH, checks the class, too.
    - Guards on the tensors that an offloaded weight consists of: other guards check the class, sizes, strides, dtype and
      device of the weight itself.
    - Guards which check that no hook takes keyword arguments, if another guard checks that there are no hooks at all.
    - Guards on backward hooks, if gradients are disabled: another guard checks that gradients stay disabled, and backward
      hooks never run without gradients.
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
