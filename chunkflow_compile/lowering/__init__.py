"""Lowering: turns the regions of a program into callables, one per unique region.

lower.py leaves regions eager, or compiles them with inductor.py or tensorrt.py.
"""
