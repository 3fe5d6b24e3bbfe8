"""The exception for errors that are shown to the user."""

__all__ = ["DataError"]


class DataError(ValueError):
    """Invalid user input or an unusable data set. The message is written for the user."""
