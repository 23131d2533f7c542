"""The token of an offloaded weight: it shows whether the weight still exists, and whether it has changed."""

from __future__ import annotations


class WeightToken:
    """A token that lives as long as the weight that holds it as an attribute.

    Weak references point to the token and not to the weight, because torch.utils.swap_tensors raises an error for tensors
    that have weak references.
    ``state``: an object that is replaced after each change of the buffer; ``mark_of`` in ``host_weight.py`` lists the
    exceptions.  The attribute is deleted when the weight leaves its store.
    """

    def __init__(self) -> None:
        self.state = object()

    def change(self) -> None:
        self.state = object()

    def leave_store(self) -> None:
        self.__dict__.pop("state", None)
