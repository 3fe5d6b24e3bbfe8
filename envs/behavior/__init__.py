"""Behavior policies: their weights and model cards, recording from them, and training them."""
