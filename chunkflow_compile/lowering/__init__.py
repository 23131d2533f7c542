"""Lowering: the regions of a program come in, one callable for each unique region goes out.

One file: lower.py compiles them with Inductor, or leaves them eager.
"""
