"""Simulation: a problem or a program and a hardware profile come in; plans, records or a timeline go out.

One file: arms.py.  Nothing here needs weights or a device.
"""
