"""The one exception of the package: a sentence that names the thing, the cause and the fix."""


class ChunkflowError(RuntimeError):
    """A finding that a person can act on.  Raised before any weight moves wherever that is possible."""
