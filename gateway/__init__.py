"""The gateway: OpenAI-compatible HTTP and gRPC before the cluster. It owns every request until its one terminal reply."""
