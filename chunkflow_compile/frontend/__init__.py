"""Compiles Dynamo graphs to programs.  The input is a Dynamo graph.  The output is a callable that runs the graph and streams
its weights.

Read backend.py and graph_compiler.py first, then trace.py, preconditions.py and model_lookup.py.  compile.py compiles a model
block by block.  block_kinds.py finds the block types for it, compiled_calls.py replaces the calls of the model and its
blocks, and guard_filter.py selects the guards to keep.
"""
