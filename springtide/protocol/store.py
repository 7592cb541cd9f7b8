"""Words between stores, and between a store and its engine."""

from __future__ import annotations

from enum import Enum


class Tier(Enum):
    """Where a store holds a block."""

    DRAM = "dram"
    SSD = "ssd"
