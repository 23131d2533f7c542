"""From Dynamo to a program: a graph comes in, a callable that streams its weights goes out.

Read backend.py, then trace.py, frame.py, and stores.py, which moves weights when a program starts.  compile.py compiles a
model block by block, with the kinds of blocks that block_kinds.py finds, and the guards that guard_filter.py keeps.
"""
