"""Weights by their Hugging Face names, from safetensors directories and GGUF files."""
