"""What ChunkFlow uses of torch's private packages: one module each, and nothing else imports these packages.

A release of torch may rename or change any of it.  tests/test_private_torch.py checks what ChunkFlow expects of each name, on
the torch that is installed.
"""
