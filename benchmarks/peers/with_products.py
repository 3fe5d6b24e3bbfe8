"""Large matrix products: what the machine can do.

``"plain"`` is ``a @ b``, which makes room for its result anew, ``"given"`` the same with that room given; both in
seconds per floating-point operation. There are no steps.
"""

import time
from collections.abc import Callable

import torch
from serve import Episodes, Extras, Request, Step, serve

SIZE, REPEATS = 1024, 5


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Products by turns."""
    torch.set_num_threads(request.threads)
    a, b = torch.randn(2, SIZE, SIZE)
    room = torch.empty(SIZE, SIZE)

    def rate(product: Callable[[], object]) -> float:
        begin = time.perf_counter()
        for _ in range(REPEATS):
            product()
        return (time.perf_counter() - begin) / (REPEATS * 2 * SIZE**3)

    return lambda: None, {"plain": lambda: rate(lambda: a @ b), "given": lambda: rate(lambda: torch.mm(a, b, out=room))}


serve(build)
