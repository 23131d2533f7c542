"""The runtime runs verified programs on a device.  It returns the outputs of each call, and measures times.

Read the modules in this order: device_base, streams, device, cuda; tenants, arena, target, compute_work, instructions,
executor; cuda_graphs, recorder, capture; variants, call_site, bound_cycle, cycle_plan, order, single_call, graph; traffic,
measurement, rank_times; rows, hoisted.  The other modules, for example torch_cuda and link, support these modules.
"""
