"""Lowering: the regions of a program come in, one callable for each unique region goes out.

lower.py compiles them with Inductor, or leaves them eager; warm_up.py starts beside the tracing what Inductor does first.
"""
