"""Attention over a paged KV cache: one interface, one module a backend."""
