"""Trajectories, store, normalizer and sampler: the way from arrays on disk to batches of windows."""
