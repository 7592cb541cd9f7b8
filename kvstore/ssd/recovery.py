"""What of a directory's files is still good after a restart."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kvstore.ssd.disk import Disk
from kvstore.ssd.errors import DiskError
from kvstore.ssd.format import Entry, Layout
from kvstore.ssd.segment import SUFFIX, Segment
from kvstore.ssd.space import SegmentSlot
from springtide.ids import BlockKey

logger = logging.getLogger(__name__)


class Record(NamedTuple):
    """A block that is held."""

    place: SegmentSlot
    entry: Entry


@dataclass(slots=True)
class Recovered:
    """What was found in a directory."""

    segments: dict[int, Segment] = field(default_factory=dict)
    records: dict[BlockKey, Record] = field(default_factory=dict)
    """The blocks that are held, in the order of `parents_first`."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Blocks, by reason: torn, orphan."""
    unreadable_bytes: int = 0
    """The bytes of segments that are left as they are, and out: they are tried again at the next start."""


def recover(disk: Disk, directory: Path, layout: Layout, capacity_bytes: int, direct: bool) -> Recovered:
    """Reads headers and tables, not the blocks. Blocks that cannot be had or whose ancestors are missing are dropped for good; files of
    another layout, empty ones and those beyond `capacity_bytes` are deleted. Raises OSError."""
    recovered = Recovered()
    try:
        for path in sorted(directory.glob(f"*{SUFFIX}")):
            try:
                segment = Segment.open(disk, path, layout, direct)
            except DiskError as error:
                logger.error("%s is left out: its blocks, and what continues them, are not served: %s", path, error)
                recovered.unreadable_bytes += path.stat().st_size
                continue
            if segment is None:
                logger.warning(
                    "%s is no segment of this store (%s, %d bytes a block): deleted", path, layout.fingerprint, layout.bytes_per_slot
                )
                path.unlink()
            else:
                recovered.segments[segment.number] = segment
        _recover_blocks(recovered, capacity_bytes - recovered.unreadable_bytes)
    except BaseException:
        for segment in recovered.segments.values():
            segment.close()
        raise
    return recovered


def _recover_blocks(recovered: Recovered, capacity_bytes: int) -> None:
    found = {number: dict(segment.entries()) for number, segment in recovered.segments.items()}
    for number in _superfluous(recovered.segments, found, capacity_bytes):
        logger.info("segment %d is empty or beyond the capacity: deleted", number)
        recovered.segments.pop(number).delete()
        del found[number]
    newest: dict[BlockKey, Record] = {}
    good = [
        Record(SegmentSlot(number, slot), entry)
        for number, entries in found.items()
        for slot, entry in entries.items()
        if entry is not None
    ]
    for record in sorted(good, key=lambda record: record.entry.sequence):
        newest.pop(record.entry.key, None)
        newest[record.entry.key] = record
    recovered.records = {record.entry.key: record for record in parents_first(newest)}
    recovered.dropped = {
        "torn": sum(entry is None for entries in found.values() for entry in entries.values()),
        "orphan": len(newest) - len(recovered.records),
    }
    kept = {record.place for record in recovered.records.values()}
    for number, entries in found.items():
        gone = [slot for slot in entries if SegmentSlot(number, slot) not in kept]
        try:
            recovered.segments[number].commit(dict.fromkeys(gone))
        except DiskError as error:  # the next start finds them again, as after a removal that could not be written
            logger.warning("what is dropped of segment %d could not be cleared: %s", number, error)


def _superfluous(segments: Mapping[int, Segment], found: Mapping[int, Mapping[int, Entry | None]], capacity_bytes: int) -> Iterator[int]:
    """Segments without a block, and those written longest ago when all together are more than `capacity_bytes`."""
    last_written = {number: max((entry.sequence for entry in found[number].values() if entry), default=-1) for number in segments}
    excess = sum(segment.num_bytes for segment in segments.values()) - capacity_bytes
    for number in sorted(segments, key=lambda number: last_written[number]):
        if excess <= 0 and last_written[number] >= 0:
            return
        excess -= segments[number].num_bytes
        yield number


def parents_first(records: Mapping[BlockKey, Record]) -> Iterator[Record]:
    """The records whose ancestors are all there, parents before their children, otherwise older before younger."""
    children: dict[BlockKey | None, list[Record]] = {}
    for record in records.values():
        children.setdefault(record.entry.parent, []).append(record)
    ready = [(record.entry.sequence, record) for record in children.get(None, ())]
    heapq.heapify(ready)
    while ready:
        _, record = heapq.heappop(ready)
        yield record
        for child in children.get(record.entry.key, ()):
            heapq.heappush(ready, (child.entry.sequence, child))
