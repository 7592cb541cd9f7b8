"""Contexts that are kept: conversations' beginnings whose KV stays in the pool for as long as was asked (docs/context-caching.md). Knows no
API."""
