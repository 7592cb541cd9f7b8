"""Engines that prefill and decode (docs/packages/mixed_node.md)."""
