"""The exceptions of the package, and the first line of any.  Each message names the thing, the cause and the fix."""


class ChunkflowError(RuntimeError):
    """An error that the user can act on.  Raised before any weight moves where that is possible."""


class BudgetError(ChunkflowError):
    """A budget is too small.  ``needed``: the least bytes that are enough, counted as the budget is."""

    def __init__(self, message: str, needed: int) -> None:
        super().__init__(message)
        self.needed = needed


class FindingError(ChunkflowError):
    """A check found a fault in the program; the call itself was valid."""


def shortage(error: BaseException | None) -> BudgetError | None:
    """The error, or a cause of it, which says that a budget is too small; None if there is none."""
    while error is not None and not isinstance(error, BudgetError):
        # Dynamo drops the cause of a backend's error
        error = error.__cause__ or getattr(error, "inner_exception", None)
    return error


def first_line(error: BaseException) -> str:
    """The type of an error, and the first line of its message."""
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "no reason given")
    return f"{type(error).__name__}: {said}"
