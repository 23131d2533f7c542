"""From Dynamo to a program.  Input: a Dynamo graph.  Output: a callable that streams the weights of the graph.

Read backend.py and graph_compiler.py first, then trace.py, preconditions.py and model_lookup.py, which moves weights when a
program starts.  compile.py compiles a model block by block.  block_kinds.py finds the block types for it, compiled_calls.py
replaces the calls of the model and its blocks, and guard_filter.py selects the guards to keep.
"""
