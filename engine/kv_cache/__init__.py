"""Where keys and values are while a pass computes."""
