"""Where a model's weights live: in host memory, as tensors that work like any other.

In: weights to offload.  Out: host tensors that a device copies from, and at the end the weights as they were.
Read: host_weight (the tensor), host_buffer (its memory), packed, backing (where that lies), pinning (with the protocol by
which this package knows devices), host_store, loader, leaves, modules, guards.
``runtime`` imports this package, and ``placed`` imports both.
"""
