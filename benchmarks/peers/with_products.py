"""Large matrix products, which show the machine's limit.

``"plain"`` times ``a @ b``, which allocates its output; ``"given"`` times the same with a preallocated output. Both
return seconds per floating-point operation. There are no training steps.
"""

import time
from collections.abc import Callable

import torch
from serve import Episodes, Extras, Request, Step, serve

SIZE, REPEATS = 1024, 5


def build(request: Request, episodes: Episodes) -> tuple[Step, Extras]:
    """Build the commands ``"plain"`` and ``"given"``."""
    torch.set_num_threads(request.threads)
    a, b = torch.randn(2, SIZE, SIZE)
    out = torch.empty(SIZE, SIZE)

    def rate(product: Callable[[], object]) -> float:
        begin = time.perf_counter()
        for _ in range(REPEATS):
            product()
        return (time.perf_counter() - begin) / (REPEATS * 2 * SIZE**3)

    return lambda: None, {"plain": lambda: rate(lambda: a @ b), "given": lambda: rate(lambda: torch.mm(a, b, out=out))}


serve(build)
