"""What is computed for all instances at once: in C, and the same in Python and numpy."""
