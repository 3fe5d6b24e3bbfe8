"""Grids of runs on one machine or on a Ray cluster."""
