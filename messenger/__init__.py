"""Messenger: moves bytes between registered memory of different processes, one-sidedly. Knows nothing of tensors or blocks."""
