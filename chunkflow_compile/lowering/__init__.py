"""Lowering: turns the regions of a program into callables, one for each distinct region.

lower.py compiles regions with Inductor (inductor.py) or TensorRT (tensorrt.py), or leaves them eager.
"""
