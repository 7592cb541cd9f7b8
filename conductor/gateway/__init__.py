"""The gateway: OpenAI-compatible HTTP and gRPC in front of the cluster. It owns every request from its acceptance to its one terminal reply."""
