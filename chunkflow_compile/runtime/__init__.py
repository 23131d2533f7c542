"""The runtime runs verified programs on a device.

The runtime gets a program, its lowered regions, and the weights of a model.  It returns the outputs of each call, and
measures times.  A good order in which to read its modules:

* devices: device_base, streams, device, cuda
* the calls of a program: tenants, arena_contents, arena, target, compute_work, collective_work, instructions, executor
* CUDA graphs: cuda_graphs, recorder, capture
* compiled graphs and cycles: variants, call_site, bound_cycle, cycle_plan, order, single_call, graph
* measured times: traffic, measurement, rank_times
* hoisted products: input_bits, schedules, rows, hoisted
* details of devices: host_clock, link, read_ahead, torch_cuda, cuda_streams, cuda_pulls, cuda_time, wrapped_calls
"""
