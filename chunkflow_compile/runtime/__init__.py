"""The runtime runs verified programs on a device.  It returns the outputs of each call, and measures times.

Read in this order: device_base, streams, device, cuda; tenants, arena, target, compute_work, instructions, executor;
cuda_graphs, recorder, capture; variants, call_site, bound_cycle, cycle_plan, order, single_call, graph; traffic, measurement,
rank_times; rows, hoisted.  The other modules support these: torch_cuda, cuda_streams, cuda_time, host_clock, link.
"""
