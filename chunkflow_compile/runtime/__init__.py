"""The runtime: runs a verified program on a device.

In: a program, its lowered regions, the weights of a model.  Out: the outputs of a call, and what each step took.
Read: streams, device, cuda, cuda_time, staged; arena, binding, instructions, executor; codes, session, runner, tables;
traffic, measurement.
The rest serves one of these: locks, host_clock, outputs (copies out of slots), link (emulated), host_flag (host-yield).
"""
