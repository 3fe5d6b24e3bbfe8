"""Environments, data sets and the table of tasks. Imports ``primal_dt``; never the other way round."""
