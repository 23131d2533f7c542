"""Graph: cuts a Traced ATen graph into regions.  The result is a Cut, with the Problem for placement.

Read traced.py (the input) first, then discover.py (weights and collectives), segments.py and regions.py (the cut), which
uses keys and symbolic_sizes.  After that, read labels.py and listing.py, which name regions and print graphs.
"""
