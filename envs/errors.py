"""The error that a user sees."""

__all__ = ["DataError"]


class DataError(ValueError):
    """A user's mistake, or a data set that cannot be used. The message is for the user."""
