"""Which prefixes are copied to where."""
