"""Who asks, what they may have, and what they have had: API keys, limits and usage. Knows no API."""
