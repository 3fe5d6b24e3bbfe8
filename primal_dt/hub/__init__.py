"""Shared policies: folders to publish with a model card, the Hugging Face hub, and those that come with the package."""
