"""Gemini's API, as a façade over the one request model."""
