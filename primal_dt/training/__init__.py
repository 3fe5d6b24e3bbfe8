"""The trainer, and what a run writes: metrics, checkpoints and the run folder."""
