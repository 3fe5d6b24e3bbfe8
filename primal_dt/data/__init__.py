"""From arrays on disk to a batch of windows: trajectories, store, normalizer, sampler."""
