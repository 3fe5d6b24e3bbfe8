"""Word-level language models on WikiText."""
