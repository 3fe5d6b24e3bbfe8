"""Classification of time series: the UEA archive."""
