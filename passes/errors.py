"""The exceptions that the package raises, and functions that inspect exceptions.  Each message names the object, the cause
and the fix."""


class ChunkflowError(RuntimeError):
    """An error that the user can act on.  Where possible, it is raised before any weight is moved."""


class BudgetError(ChunkflowError):
    """A budget is too small.  ``needed``: minimum budget in bytes.  Like the given budget, it covers either weights and
    activations, or weights alone."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class FindingError(ChunkflowError):
    """A check found a fault in a program or in the result of a pass.  The user's options were valid."""


def shortage(error: BaseException | None) -> BudgetError | None:
    """Return the first BudgetError among an error and its causes, or None if none of them is a BudgetError."""
    while error is not None and not isinstance(error, BudgetError):
        # Dynamo sets inner_exception instead of the cause
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return error


def first_line(error: BaseException) -> str:
    """Return the type of an error and the first line of its message."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {said}"
