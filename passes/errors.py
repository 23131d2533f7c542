"""The exceptions of the package: a sentence that names the thing, the cause and the fix."""


class ChunkflowError(RuntimeError):
    """Something that a person can act on.  Raised before any weight moves wherever that is possible."""


class FindingError(ChunkflowError):
    """A check that was asked for found something: the program is at fault, not how it was called."""
