"""Training, and what a run writes: metrics, checkpoints, its folder."""
