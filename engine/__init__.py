"""The engine: runs a model over a paged KV cache. No network. `formats`, but for weights, and `tokenizer` do without torch."""
