"""Hardware profiles, and the facts about this machine: a profile's name or a device comes in, a ``Hardware`` or
``Machine`` goes out.

Read profiles.py (built-in profiles, *.json) and emulated.py (a profile with an emulated link) first, then machine.py (the
facts that chunkflow doctor checks).  Measurement starts with contention.py (copies concurrent with other work) and
loopback.py (collectives in one process); calibrate.py uses both.
"""
