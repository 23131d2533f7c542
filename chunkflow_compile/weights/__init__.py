"""The weights of a model in host memory, as tensors that work like any other.

Programs copy from these tensors to the device, and a restore turns them into ordinary parameters again.
Read in this order: host_weight (the tensor), host_buffer, weight_memory (its memory), packed, backing (where the bytes
are stored), pinning (which also defines the protocol of a device), host_store, loader, leaves, modules, guards.
``runtime`` imports this package, and ``placed`` imports both.
"""
