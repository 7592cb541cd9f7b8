"""Decides what a prefill group does next. Pure: no I/O, no clock, no randomness."""

from prefill_node.core.core import PrefillCore

__all__ = ["PrefillCore"]
