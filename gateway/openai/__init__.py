"""OpenAI's APIs, with what vLLM's server adds to them."""
