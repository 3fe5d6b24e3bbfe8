"""Policies that record data: their weights and cards, recording, training them."""
