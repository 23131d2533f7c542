"""Graph: cuts a Traced ATen graph into regions.  The result is a Cut, with the Problem for placement.

Read traced.py (the input) first, then discover.py (weights and collectives), segments.py and regions.py (the cut).  After
that, read keys.py and symbolic_sizes.py, which regions.py uses, labels.py (names of regions) and listing.py (graphs as text).
"""
