"""Passes: turn a traced graph into a verified program.  The passes use no threads, clocks or devices.

A module imports only from its own package or from packages to its left::

    types < cost < graph < placement < program < planning < cutting < pipeline

The frozen types are in the modules errors, hardware, problem, plan, step and ops.  The packages and their results::

    cost       a region's graph   -> Cost     FLOPs and bytes, or measured seconds
    graph      ATen graph         -> Cut      regions, the collectives between them, and their Problem
    placement  Problem + Hardware -> Plan     home, slot and windows of every weight, for a goal
    program    Cut + Plan         -> Program  an FX graph with prefetch / wait / evict, proved safe

:mod:`pipeline` runs the passes of all packages in order.  From the rest of chunkflow_compile, the passes import only the
module ``units``.
"""
