"""A real cluster under faults: what is sent and what is broken comes from a seed, and what came of it is checked. See docs/chaos.md."""
