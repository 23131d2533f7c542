"""Simulation: a program or the components of a pipeline, and a hardware profile, come in; a timeline or phases go out.

arms.py plays a program, group_offload.py what diffusers does, sharded.py what other systems do on several ranks,
generation.py plans a whole pipeline.  Nothing here needs weights or a device.
"""
