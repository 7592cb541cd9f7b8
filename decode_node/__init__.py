"""A decode node: generates tokens for a continuously changing batch of sequences whose prompts were computed elsewhere."""
