"""Kimi's façade of context caches."""
