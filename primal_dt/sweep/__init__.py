"""Run grids of training runs on one machine or on a Ray cluster."""
