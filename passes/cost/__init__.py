"""Cost.  Input: a region's graph, or measured Timings.  Output: FLOPs and bytes, or seconds.

Read count, then timings.
"""
