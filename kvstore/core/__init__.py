"""What the pool decides: which slot holds what, for whom, and what goes when room is needed. No I/O, no clock, no randomness."""
