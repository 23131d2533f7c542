"""The exceptions of the package.  Each message names the thing, the cause and the fix."""


class ChunkflowError(RuntimeError):
    """An error that the user can act on.  Raised before any weight moves where that is possible."""


class FindingError(ChunkflowError):
    """A check found a fault in the program; the call itself was valid."""
