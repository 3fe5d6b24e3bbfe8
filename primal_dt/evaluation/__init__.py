"""Rollouts, normalized returns, statistics, reports and plots."""
