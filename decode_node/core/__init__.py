"""Decides what a decode node does next. Pure: no I/O, no clock, no randomness."""

from decode_node.core.core import DecodeCore

__all__ = ["DecodeCore"]
