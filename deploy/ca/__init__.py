"""The certificates of a cluster: the authority that makes them, and where a machine keeps its own."""
