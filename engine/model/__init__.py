"""The decoder, which all families of models are."""
