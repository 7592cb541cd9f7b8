"""How a machine joins a running cluster: tokens, what is asked and answered, the service at the head and its client."""
