"""What the parts of a store process share."""
