"""Cost: computes FLOPs and bytes from the graph of a region, or seconds from measured Timings.

Read count.py first, then timings.py.
"""
