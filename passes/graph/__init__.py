"""Graph.  Input: a Traced ATen graph.  Output: a Cut, with the Problem for placement.

Read traced (the input), discover (weights and collectives), regions (the cut) with keys and sizes; then labels and
listing, which name regions and print graphs.
"""
