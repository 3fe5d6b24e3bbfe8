"""Time-series classification on the UEA archive."""
