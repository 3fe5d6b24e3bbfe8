"""The Decision Transformer and the loss that it is trained with."""
