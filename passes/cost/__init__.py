"""Cost: computes FLOPs and bytes from the graph of a region, or seconds from measured Timings.

Start with count, then read timings.
"""
