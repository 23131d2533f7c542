"""Lowering: the regions of a program come in, one callable for each unique region goes out.

lower.py leaves them eager, or compiles them through inductor.py or tensorrt.py.
"""
