"""Files of requests that are answered in idle capacity, each exactly once whatever dies. Knows no API."""
