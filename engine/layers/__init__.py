"""Several layers of a model in one go, where a backend can do that."""
