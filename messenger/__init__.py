"""Messenger: moves bytes between registered memory of different processes, one-sidedly. It knows nothing of tensors or blocks."""
