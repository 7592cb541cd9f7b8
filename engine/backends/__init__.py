"""What models are computed with: the interface, one module or folder for each backend, and which one is chosen."""
