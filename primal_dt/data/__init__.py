"""From arrays on disk to batches of windows: trajectories, store, normalizer, sampler."""
