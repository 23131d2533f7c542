"""Hardware profiles, and this machine: a profile's name or a device comes in, a ``Hardware`` or ``Machine`` goes out.

Read profiles.py (built-in profiles, *.json) and emulated.py (a profile with an emulated link) first, then machine.py
(what chunkflow doctor checks).  Measurement: contention.py (copies beside other work) and loopback.py (collectives in one
process), then calibrate.py, which uses both.
"""
