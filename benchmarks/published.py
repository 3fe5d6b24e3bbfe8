"""Published results outside offline RL, for comparison with ours.

Source: Primal-Attention (arXiv 2305.19798), Tables 1 to 3, as printed. Columns use our names of the attention stacks.
"""

from collections.abc import Mapping

__all__ = ["TABLE_1", "TABLE_2", "TABLE_3"]

_UEA = ("softmax", "linear", "reformer", "performer", "cosformer", "flowformer", "primalformer", "primal-plus")
_LRA = ("softmax", "reformer", "performer", "linformer", "nystromformer", "primalformer", "primal-plus")
Table = Mapping[str, Mapping[str, float]]


def _table(columns: tuple[str, ...], rows: Mapping[str, str]) -> Table:
    return {row: dict(zip(columns, map(float, text.split()), strict=True)) for row, text in rows.items()}


TABLE_1 = _table(
    _UEA,
    {
        "EthanolConcentration": "32.7 31.9 31.9 31.2 32.3 33.8 33.1 35.4",
        "FaceDetection": "67.3 67.0 68.6 67.0 64.8 67.6 67.1 63.8",
        "Handwriting": "32.0 34.7 27.4 32.1 28.9 33.8 29.6 28.7",
        "Heartbeat": "76.1 76.6 77.1 75.6 77.1 77.6 76.1 77.1",
        "JapaneseVowels": "98.7 99.2 97.8 98.1 98.3 98.9 98.4 98.9",
        "PEMS-SF": "82.1 82.1 82.7 80.9 83.2 83.8 89.6 90.2",
        "SelfRegulationSCP1": "92.2 92.5 90.4 91.5 91.1 92.5 92.5 92.5",
        "SelfRegulationSCP2": "53.9 56.7 56.7 56.7 55.0 56.1 57.2 56.1",
        "SpokenArabicDigits": "98.4 98.0 97.0 98.4 98.4 98.8 100 100",
        "UWaveGestureLibrary": "85.6 85.0 85.6 85.3 85.6 86.6 86.3 88.4",
    },
)
"""UEA data set -> stack -> test accuracy in percent, of the best epoch on the test split."""

TABLE_2 = _table(
    _LRA,
    {
        "listops": "37.1 19.1 18.8 37.3 37.2 37.3 37.3",
        "text": "65.0 64.9 63.8 55.9 65.5 61.2 65.4",
        "retrieval": "79.4 78.6 78.6 79.4 79.6 77.8 81.0",
        "image": "38.2 43.3 37.1 37.8 41.6 43.0 43.9",
        "pathfinder": "74.2 69.4 69.9 67.6 70.9 68.3 74.3",
    },
)
"""Long-Range Arena task -> stack -> test accuracy in percent."""

TABLE_3: Mapping[str, Table] = {
    "seconds": _table(
        _LRA,
        {
            "listops": "194.5 87.0 83.8 63.4 68.4 56.5 113.4",
            "text": "694.8 168.5 157.5 116.5 120.9 93.6 367.6",
            "retrieval": "1333.7 339.9 320.6 226.2 235.5 185.3 546.5",
            "image": "334.5 223.7 211.4 158.5 179.5 142.9 212.1",
            "pathfinder": "405.5 286.7 278.1 204.0 221.2 180.0 263.2",
        },
    ),
    "gigabytes": _table(
        _LRA,
        {
            "listops": "5.50 1.64 1.67 1.73 0.89 0.69 5.24",
            "text": "21.24 3.29 3.34 3.45 1.69 1.37 20.7",
            "retrieval": "18.72 6.09 6.28 6.33 3.29 2.99 18.59",
            "image": "5.88 3.29 3.34 3.45 1.93 1.39 5.35",
            "pathfinder": "5.88 3.29 3.34 3.45 1.93 1.52 5.35",
        },
    ),
}
"""Quantity -> task -> stack -> value: seconds per 1,000 training steps, and peak memory, on one V100."""
