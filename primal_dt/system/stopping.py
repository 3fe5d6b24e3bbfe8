"""Ctrl-C and SIGTERM as a wish that is granted at the next good moment."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["StopRequest", "StopRequestedError", "catch_signals"]


class StopRequestedError(Exception):
    """Raised where work is given up since a stop was requested."""


class StopRequest:
    """Whether somebody asked to stop, and by which signal."""

    def __init__(self) -> None:
        self.signal: int | None = None

    def give_way(self, _: object = None) -> None:
        """To be called now and then by what takes long.

        Raises:
            StopRequestedError: if a stop was requested.
        """
        if self.signal is not None:
            raise StopRequestedError


@contextmanager
def catch_signals(on_request: Callable[[], None]) -> Iterator[StopRequest]:
    """Turn Ctrl-C and SIGTERM into a request; a second Ctrl-C acts as usual.

    (A second SIGTERM does not: schedulers and torchrun both send one, and the first is being obeyed.)

    Args:
        on_request: called at once, from the signal's handler.
    """
    request = StopRequest()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, _: FrameType | None) -> None:
        request.signal = request.signal or number
        signal.signal(signal.SIGINT, before[signal.SIGINT])
        on_request()

    for number in before:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
