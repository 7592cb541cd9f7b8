"""Parts of layers without weights of their own or a place: products and rotations."""
