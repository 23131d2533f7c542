"""Hardware profiles (``Hardware``), and facts about this machine (``Machine``).

Read profiles.py first (built-in profiles, *.json), then machine.py (the facts that chunkflow doctor checks).  The module
calibrate.py measures a profile: device_figures.py measures one device, and rank_figures.py measures several ranks.
Both use contention.py, which measures how copies and other work slow each other down.
"""
