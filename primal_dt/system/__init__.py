"""Files, terminal and process: helpers for any program."""
