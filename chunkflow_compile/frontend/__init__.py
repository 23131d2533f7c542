"""From Dynamo to a program.  Input: a Dynamo graph.  Output: a callable that streams the weights of the graph.

Read backend.py first, then trace.py, preconditions.py and model_lookup.py, which moves weights when a program starts.
compile.py compiles a model block by block.  block_kinds.py finds the block types for it, and guard_filter.py selects the
guards to keep.
"""
