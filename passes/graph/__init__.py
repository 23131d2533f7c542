"""Graph: cuts a Traced ATen graph into regions.  The result is a Cut, with the Problem for placement.

Start with traced (the input), discover (weights and collectives) and regions (the cut), which uses keys and sizes.  Then
read labels and listing, which name regions and print graphs.
"""
