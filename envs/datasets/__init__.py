"""A name or a path -> trajectories: D4RL, Minari, checks, cache, download."""
