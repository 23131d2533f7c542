"""The private packages of torch that ChunkFlow uses.  Each has one module here, and no module elsewhere imports them.

Any release of torch may rename or change these names.  tests/test_private_torch.py checks that the installed torch has all of
them, and that they behave as ChunkFlow expects.
"""
