"""The engine: runs a model over a paged KV cache. No network. Submodules `files` and `tokenizer` do without torch."""
