"""What is computed between a layer's matrix products: one interface, one module an implementation."""
