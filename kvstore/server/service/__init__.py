"""What is asked of a store, and the sessions of those who ask."""
