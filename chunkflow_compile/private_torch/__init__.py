"""The private packages of torch that ChunkFlow uses: one module for each, and no other module imports them.

A release of torch may rename or change any of it.  tests/test_private_torch.py checks what ChunkFlow expects of each name, on
the torch that is installed.
"""
