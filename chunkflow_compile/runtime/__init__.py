"""The runtime: runs a verified program on a device.

In: a program, its lowered regions, the weights of a model.  Out: the outputs of a call, and what each step took.
Read: device_base, streams, device, cuda; arena, target, instructions, executor; cuda_graphs, recorder, capture; codes,
call_site, bound_cycle, cycle_plan, order, single_call, graph; traffic, measurement, rank_times.
The rest serves one of these: torch_cuda, cuda_streams, cuda_time, locks, host_clock, wrapped_calls, link (emulated).
"""
