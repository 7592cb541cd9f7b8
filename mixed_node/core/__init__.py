"""The decisions, free of I/O and clock."""

from mixed_node.core.core import MixedCore

__all__ = ["MixedCore"]
