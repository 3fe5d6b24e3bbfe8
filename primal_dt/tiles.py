"""Work on many rows, divided so that no row's result depends on the others.

How a matrix product rounds depends on its size, on where in memory its operands begin, and on how threads share it. A
tile has always the same number of rows, and one thread computes it from beginning to end; tiles run side by side.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

__all__ = ["Tiles"]


class Tiles:
    """Runs a function on tiles of rows.

    (torch has one number of threads for each thread, and one for those that are yet to come. Tiles set the latter to 1
    too: a program that makes threads of its own afterwards and computes in them has to say how many they may use.)

    Args:
        size: rows of a tile; None for one tile of all rows, in the calling thread, with all of torch's threads.
    """

    def __init__(self, size: int | None) -> None:
        if size is not None and size < 1:
            raise ValueError(f"a tile must have at least 1 row, not {size}")
        self.size = size
        self._pool: ThreadPoolExecutor | None = None

    def whole(self, num_rows: int) -> int:
        """So many rows, rounded up to whole tiles."""
        return num_rows if self.size is None else -(-num_rows // self.size) * self.size

    def run(self, function: Callable[[slice], None], num_rows: int) -> None:
        """Call a function for each tile, by its rows, in inference mode."""
        if self.size is None:
            with torch.inference_mode():
                function(slice(0, num_rows))
            return
        if self._pool is None:
            threads = torch.get_num_threads()
            self._pool = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

        def infer(first: int) -> None:
            with torch.inference_mode():  # a thread's own affair
                function(slice(first, first + size))

        size = self.size
        for _ in self._pool.map(infer, range(0, num_rows, size)):
            pass
