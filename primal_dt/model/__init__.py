"""The Decision Transformer and its training loss."""
