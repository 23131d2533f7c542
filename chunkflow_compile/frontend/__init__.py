"""From Dynamo to a program.  Input: a Dynamo graph.  Output: a callable that streams the weights of the graph.

Read backend.py, then trace.py, preconditions.py, and model_lookup.py, which moves weights when a program starts.  compile.py
compiles a model block by block, with the block types that block_kinds.py finds and the guards that guard_filter.py keeps.
"""
