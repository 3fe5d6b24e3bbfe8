"""Environments, data sets and the table of tasks. ``envs`` imports ``primal_dt``, never the other way around."""
