"""Loads data sets by name or path: D4RL, Minari, checks, cache and downloads."""
