"""Published scores, for comparison with ours.

Source: Primal-Attention (arXiv 2305.19798), Table 4: D4RL's v2 data, three seeds, mean and spread as printed. Each
column is a Decision Transformer of three layers with the named attention stack.
"""

from collections.abc import Mapping

__all__ = ["TABLE_4"]

_COLUMNS = ("softmax", "linear", "reformer", "performer", "cosformer", "flowformer", "primal-plus")
_ROWS: Mapping[tuple[str, str], str] = {
    ("halfcheetah", "medium-expert"): "83.8 3.3  78.2 3.2  81.5 1.6  85.1 2.1  85.5 2.9  90.8 0.4  77.8 22.1",
    ("hopper", "medium-expert"): "104.0 2.5  107.2 0.9  104.2 9.8  93.5 13.9  98.1 7.4  109.9 1.0  111.5 0.2",
    ("walker2d", "medium-expert"): "107.7 0.6  67.2 27.3  71.4 1.8  72.6 2.4  100.5 14.5  108.0 0.4  108.9 0.1",
    ("halfcheetah", "medium"): "42.4 0.1  42.3 0.2  42.2 0.1  42.1 0.2  42.1 0.3  42.2 0.2  43.0 0.0",
    ("hopper", "medium"): "64.2 1.1  58.7 0.4  59.9 0.7  59.7 7.5  59.8 3.8  66.9 2.5  74.5 0.6",
    ("walker2d", "medium"): "70.6 3.2  57.9 10.6  65.8 4.9  63.3 10.7  71.4 1.2  71.7 2.5  77.9 7.8",
    ("halfcheetah", "medium-replay"): "34.6 0.6  32.1 1.5  33.6 0.7  31.7 0.9  32.8 3.6  34.7 1.5  38.9 0.4",
    ("hopper", "medium-replay"): "79.7 7.4  74.3 7.0  66.1 2.6  64.6 24.2  59.3 16.5  75.5 14.5  88.5 12.5",
    ("walker2d", "medium-replay"): "62.9 5.0  62.1 7.4  50.1 3.5  61.3 6.7  60.5 9.9  62.0 3.1  76.8 10.3",
}


def _row(text: str) -> dict[str, tuple[float, float]]:
    numbers = [float(word) for word in text.split()]
    return dict(zip(_COLUMNS, zip(numbers[::2], numbers[1::2], strict=True), strict=True))


TABLE_4: Mapping[tuple[str, str], Mapping[str, tuple[float, float]]] = {task: _row(row) for task, row in _ROWS.items()}
"""The mean and spread for each (environment, tier) and each attention."""
