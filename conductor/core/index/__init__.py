"""Which store holds which blocks."""
