"""Where a model's weights live: in host memory, while its parameters are empty.

In: parameters to offload.  Out: host tensors that a device copies from, and at the end the parameters as they were.
Read: reader (the protocol by which this room knows devices), bytes, staging, host_memory, host_store, modules, guards.
``runtime`` stands above this room, ``placing`` above both.
"""
