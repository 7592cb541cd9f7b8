"""Anthropic's Messages API, as a façade over the one request model."""
