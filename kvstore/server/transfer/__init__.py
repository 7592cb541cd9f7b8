"""Every way on which blocks come and go: between stores, and between the arena and the SSD."""
