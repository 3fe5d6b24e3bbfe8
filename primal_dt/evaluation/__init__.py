"""Rollouts, returns, scores, statistics, reports, plots."""
