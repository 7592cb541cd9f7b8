"""What a segment file looks like.

    header page | table: one entry for each slot, padded to pages | slots, each padded to pages

All numbers are little-endian. The table lies apart from the bytes of the blocks, so a restart reads only it. An entry is written when its
block is complete: it is what makes the block exist. Checksums are XXH3-64.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from kvstore.ssd.disk import ALIGNMENT
from springtide.blocks import KEY_BYTES
from springtide.ids import BlockKey

MAGIC = b"STKVSEG1"
_HEADER = struct.Struct("<8s32sQQQ")
"""Magic, digest of the fingerprint, bytes per slot, slots, number of the segment."""
_CHECKSUM = struct.Struct("<Q")
_ENTRY = struct.Struct(f"<{KEY_BYTES}s{KEY_BYTES}sQQQ")
"""Key, parent, sequence, checksum of the block, flags."""
ENTRY_BYTES = _ENTRY.size + _CHECKSUM.size
_FREE = bytes(ENTRY_BYTES)
_HAS_PARENT = 1
_NO_PARENT = bytes(KEY_BYTES)


def pages(num_bytes: int) -> int:
    """The bytes of whole pages that hold `num_bytes`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def checksum(block: memoryview) -> int:
    """The checksum of a block's bytes."""
    return xxh3_64_intdigest(block)


class Entry(NamedTuple):
    """One block of a segment."""

    key: BlockKey
    parent: BlockKey | None
    sequence: int
    """Larger is written later, over all segments."""
    checksum: int
    """That of the block's bytes."""


@dataclass(frozen=True, slots=True)
class Layout:
    """What the segments of one store have in common."""

    bytes_per_slot: int
    fingerprint: str
    """What names the model, data type and block size. Files of another one are not of this store."""

    def __post_init__(self) -> None:
        if self.bytes_per_slot < 1:
            raise ValueError(f"Layout.bytes_per_slot must be at least 1, not {self.bytes_per_slot}")

    @property
    def stride(self) -> int:
        """The bytes from slot to slot of a file."""
        return pages(self.bytes_per_slot)

    def data_offset(self, num_slots: int) -> int:
        return ALIGNMENT + pages(num_slots * ENTRY_BYTES)

    def segment_bytes(self, num_slots: int) -> int:
        return self.data_offset(num_slots) + num_slots * self.stride

    def slots_in(self, num_bytes: int) -> int:
        """The number of slots of the largest segment that takes no more than `num_bytes`."""
        slots = max(0, (num_bytes - ALIGNMENT) // (self.stride + ENTRY_BYTES))
        while slots and self.segment_bytes(slots) > num_bytes:
            slots -= 1
        return slots

    def header(self, segment: int, num_slots: int) -> bytes:
        digest = blake2b(self.fingerprint.encode(), digest_size=32).digest()
        fields = _HEADER.pack(MAGIC, digest, self.bytes_per_slot, num_slots, segment)
        return fields + _CHECKSUM.pack(xxh3_64_intdigest(fields))

    def read_header(self, page: memoryview) -> tuple[int, int] | None:
        """Number and slots of the segment that begins with `page`, or None when it is not one of this store."""
        _, _, _, num_slots, segment = _HEADER.unpack_from(page)
        header = self.header(segment, num_slots)
        return (segment, num_slots) if page[: len(header)] == header else None


class Table:
    """The entries of a segment, as bytes. Each has a checksum that holds for this place of this segment only."""

    def __init__(self, memory: memoryview, header: bytes) -> None:
        """Stays the caller's: `memory`, the table's bytes; it may be read at any time and is written by `put` and `clear` alone."""
        self._memory = memory
        self._seed = xxh3_64_intdigest(header)

    def put(self, slot: int, entry: Entry) -> None:
        flags = 0 if entry.parent is None else _HAS_PARENT
        fields = _ENTRY.pack(entry.key, entry.parent or _NO_PARENT, entry.sequence, entry.checksum, flags)
        self._memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = fields + _CHECKSUM.pack(self._checksum(slot, fields))

    def clear(self, slot: int) -> None:
        self._memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES] = _FREE

    def entries(self, num_slots: int) -> Iterator[tuple[int, Entry | None]]:
        """The slots that are not free, with their entries, None being one that was torn or damaged."""
        for slot in range(num_slots):
            raw = bytes(self._memory[slot * ENTRY_BYTES : (slot + 1) * ENTRY_BYTES])
            if raw == _FREE:
                continue
            (expected,) = _CHECKSUM.unpack_from(raw, _ENTRY.size)
            if self._checksum(slot, raw[: _ENTRY.size]) != expected:
                yield slot, None
                continue
            key, parent, sequence, block_checksum, flags = _ENTRY.unpack_from(raw)
            yield slot, Entry(BlockKey(key), BlockKey(parent) if flags & _HAS_PARENT else None, sequence, block_checksum)

    def _checksum(self, slot: int, fields: bytes) -> int:
        return xxh3_64_intdigest(fields, self._seed ^ slot)
