"""Graph in, graph or plan out: no threads, no clocks, no devices.

One pass a file, in the order in which they run::

    discover   ATen graph             -> Discovery   weights, their uses through views, collectives
    regions    ATen graph + Discovery -> Cut         pieces of pure compute and the collectives between them
    place      Problem + Hardware     -> Plan        home, slot and windows of every weight, for a goal
    rewrite    Cut + Plan             -> Program     an FX graph with prefetch / wait / evict
    verify     Program                -> None        or a ChunkflowError that names the missing edge

``place`` makes candidates (:mod:`windows`, :mod:`residency`, :mod:`policies`, :mod:`search`, :mod:`refine`), plays each
(:mod:`schedule`, :mod:`timeline`) and cuts slots (:mod:`slots`).  The types between the passes are frozen: :mod:`problem`,
:mod:`hardware`, :mod:`plan`.  Nothing here imports the rest of the package.
"""
