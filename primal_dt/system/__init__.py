"""Files, terminal, process: what every program needs, whatever it is about."""
