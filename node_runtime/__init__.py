"""What the engine processes of prefill and decode nodes have in common: the store's port, sessions, load reports, costs, life cycle."""
