"""D4RL's reference returns, which scores 0 and 100 stand for. They are the same for its data sets v0, v1 and v2."""

from collections.abc import Mapping

from primal_dt.task import Reference

__all__ = ["REFERENCES"]

REFERENCES: Mapping[str, Reference] = {
    "halfcheetah": Reference(-280.178953, 12135.0),
    "hopper": Reference(-20.272305, 3234.3),
    "walker2d": Reference(1.629008, 4592.3),
    "ant": Reference(-325.6, 3879.7),
    "pen": Reference(96.262799, 3076.8331017826877),
    "hammer": Reference(-274.856578, 12794.134825156867),
    "door": Reference(-56.512833, 2880.5693087298737),
    "relocate": Reference(-6.425911, 4233.877797728884),
    "kitchen": Reference(0.0, 4.0),
    **{f"antmaze-{part}{maze}": Reference(0.0, 1.0) for part in ("", "eval-") for maze in ("umaze", "medium", "large")},
    "maze2d-open": Reference(0.01, 20.66),
    "maze2d-umaze": Reference(23.85, 161.86),
    "maze2d-medium": Reference(13.13, 277.39),
    "maze2d-large": Reference(6.7, 273.99),
    "maze2d-open-dense": Reference(11.17817, 27.166538620695782),
    "maze2d-umaze-dense": Reference(68.537689, 193.66285642381482),
    "maze2d-medium-dense": Reference(44.264742, 297.4552547777125),
    "maze2d-large-dense": Reference(30.569041, 303.4857382709002),
    "maze2d-eval-umaze": Reference(36.63, 141.4),
    "maze2d-eval-medium": Reference(13.07, 204.93),
    "maze2d-eval-large": Reference(16.4, 302.22),
    "maze2d-eval-umaze-dense": Reference(56.95455, 178.21373133248397),
    "maze2d-eval-medium-dense": Reference(42.28578, 235.5658957482388),
    "maze2d-eval-large-dense": Reference(56.95455, 326.09647655082637),
    "maze2d-umaze-v0": Reference(0.94, 62.6),
    "maze2d-medium-v0": Reference(5.77, 85.14),
    "maze2d-large-v0": Reference(4.83, 191.99),
    "maze2d-umaze-dense-v0": Reference(23.249793, 81.78995240126592),
    "maze2d-medium-dense-v0": Reference(19.47762, 96.03474232952358),
    "maze2d-large-dense-v0": Reference(27.38831, 215.09965671563742),
}
"""D4RL's reference returns by environment, or by name where a version has its own: maze2d v0 has shorter episodes.

From ``d4rl/infos.py``, except for ``eval`` and v0 of maze2d, which are from the suite's ``__init__.py``.
"""
