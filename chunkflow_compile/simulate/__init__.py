"""Simulation: the timeline of a program, or the phases of a pipeline, predicted for a hardware profile.

arms.py simulates a program, group_offload.py the group offload of diffusers, sharded.py the methods of other systems on
several ranks.  generation.py plans a whole pipeline.  Neither weights nor a device are needed.
"""
