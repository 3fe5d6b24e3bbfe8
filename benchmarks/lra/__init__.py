"""Classification of long sequences: the Long-Range Arena."""
