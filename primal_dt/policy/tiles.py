"""Divide work on many rows so that no row's result depends on the other rows.

How a matrix product rounds depends on its size. With some kernels it also depends on where the operands start in memory
and on how threads share the work. So a tile always has the same number of rows. Where a kernel's rounding may depend on
threads, one thread computes a whole tile, and several tiles run in parallel.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch

__all__ = ["Tiles"]

MOST_THREADS = 4
"""Maximum number of threads for one tile. In streaming mode a tile has 64 rows with 3 new tokens each. These 192
tokens, divided among 1 to 4 threads, are a multiple of what a kernel processes at a time, so that the number of threads
does not change how it rounds."""


class Tiles:
    """Runs a function on tiles of rows, in inference mode.

    Args:
        size: rows per tile; None for one tile of all rows, on all threads.
        side_by_side: run each tile on one thread, and as many tiles in parallel as torch has threads. Otherwise tiles
            run one after the other, each on at most four threads. Use that only if the products of a tile have the same
            bits on one to four threads.

            Side effect of ``side_by_side``: threads that the program creates later have one torch thread each, unless
            they call ``torch.set_num_threads``.
        most_threads: maximum number of threads for a tile that does not run side by side with others. If not given:
            four for tiles of a fixed size, otherwise all.
    """

    def __init__(self, size: int | None, *, side_by_side: bool = False, most_threads: int | None = None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a tile must have at least 1 row, not {size}")
        self.size = size
        self._side_by_side = side_by_side
        self._most_threads = MOST_THREADS if most_threads is None and size is not None else most_threads
        self._pool: ThreadPoolExecutor | None = None

    def whole(self, num_rows: int) -> int:
        """Round a number of rows up to whole tiles."""
        return num_rows if self.size is None else -(-num_rows // self.size) * self.size

    def run(self, function: Callable[[slice], None], num_rows: int) -> None:
        """Call ``function`` with the slice of rows of each tile."""
        size = self.size or max(1, num_rows)

        def infer(first: int) -> None:
            with torch.inference_mode():  # set separately in each thread
                function(slice(first, first + size))

        starts = range(0, num_rows, size)
        if not self._side_by_side:
            with _at_most_threads(self._most_threads or torch.get_num_threads()):
                for first in starts:
                    infer(first)
            return
        if self._pool is None:
            threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))
        for _ in self._pool.map(infer, starts):
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
