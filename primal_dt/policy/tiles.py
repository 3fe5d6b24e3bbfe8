"""Work on many rows, divided so that no row's result depends on the others.

How a matrix product rounds depends on its size, and with some kernels also on where its operands begin in memory and on
how threads share it. A tile has always the same number of rows; and where kernels are not known to be indifferent to
threads, one thread computes it from beginning to end, and tiles run side by side.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

__all__ = ["Tiles"]

MOST_THREADS = 4
"""Of one tile: 192 rows of tokens, shared out among 1 to 4 threads, are whole numbers of the rows that kernels take at
a time, and then round alike."""


class Tiles:
    """Runs a function on tiles of rows, in inference mode.

    Args:
        size: rows of a tile; None for one tile of all rows.
        side_by_side: each tile on one thread, as many at a time as torch has threads. Else one after the other, on at
            most four threads: for tiles whose products have the same bits when shared out among so few. (torch has one
            number of threads for each thread, and one for those that are yet to come. Side by side, the latter becomes
            1 too: a program that makes threads of its own afterwards and computes in them has to say how many.)
    """

    def __init__(self, size: int | None, *, side_by_side: bool = False) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a tile must have at least 1 row, not {size}")
        self.size = size
        self._side_by_side = side_by_side
        self._pool: ThreadPoolExecutor | None = None

    def whole(self, num_rows: int) -> int:
        """So many rows, rounded up to whole tiles."""
        return num_rows if self.size is None else -(-num_rows // self.size) * self.size

    def run(self, function: Callable[[slice], None], num_rows: int) -> None:
        """Call a function for each tile, by its rows."""
        size = self.size or max(1, num_rows)

        def infer(first: int) -> None:
            with torch.inference_mode():  # a thread's own affair
                function(slice(first, first + size))

        every = range(0, num_rows, size)
        if not self._side_by_side:
            with _at_most_threads(MOST_THREADS if self.size is not None else torch.get_num_threads()):
                for first in every:
                    infer(first)
            return
        if self._pool is None:
            threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        for _ in self._pool.map(infer, every):
            pass


@contextmanager
def _at_most_threads(number: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if before <= number:
        yield
        return
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)
