"""Graph in, graph or plan out: no threads, no clocks, no devices.

One pass a file, in the order in which they run::

    discover   ATen graph             -> Discovery   weights, their uses through views, collectives
    regions    ATen graph + Discovery -> Cut         pieces of pure compute and the collectives between them
    place      Problem                -> Plan        home, slot and window of every weight
    rewrite    Cut + Plan             -> Program     an FX graph with prefetch / wait / evict
    verify     Program                -> None        or a ChunkflowError that names the missing edge

The types between them are frozen: :mod:`problem`, :mod:`plan`.  Nothing here imports the rest of the package.
"""
