"""Simulation: predict the timeline of a program or the phases of a pipeline for a hardware profile.

played_steps.py simulates a program, group_offload.py simulates the group offload of diffusers, and sharded.py simulates how
other systems use several ranks.  generation.py plans a whole pipeline.  Neither weights nor a device are needed.
"""
