"""Hardware profiles (``Hardware``), and facts about this machine (``Machine``).

Read profiles.py (built-in profiles, *.json) and emulated.py (a profile with an emulated link) first, then machine.py (the
facts that chunkflow doctor checks).  For the measurements, begin with contention.py (copies concurrent with other work)
and loopback.py (collectives in one process); device_figures.py and rank_figures.py use them.
"""
