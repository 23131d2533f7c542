"""Where a model's weights live: in host memory, as tensors that work like any other.

In: weights to offload.  Out: host tensors that a device copies from, and at the end the weights as they were.
Read: host_weight (the tensor), host_bytes (its memory), reader (the protocol by which this room knows devices), bytes,
staging, host_memory, host_store, leaves, modules, guards.
``runtime`` stands above this room, ``placement`` above both.
"""
