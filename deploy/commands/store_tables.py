"""What `springtide store` prints: tables that fit 80 columns, or the same as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from springtide.rpc import store_pb2 as pb

KEY_DIGITS = 12
"""Of a key, enough to name it."""
_PINS = {pb.PIN_KIND_UNSPECIFIED: "", pb.PIN_KIND_SOFT: "soft", pb.PIN_KIND_HARD: "hard"}
TableRow = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    title: str
    field: str
    left: bool = False
    widest: int | None = None
    """Longer values are cut."""


def show_chains(replies: Mapping[str, pb.ListBlocksReply], as_json: bool) -> None:
    rows = [
        {
            "store": node_id,
            "key": chain.key.hex(),
            "tokens": chain.blocks * reply.block_tokens,
            "blocks": chain.blocks,
            "own_blocks": chain.own_blocks,
            "continued_by": chain.children,
            "bytes": chain.blocks * reply.bytes_per_block,
            "references": chain.references,
            "pin": _PINS[chain.pin],
            "tenant": chain.tenant,
        }
        for node_id, reply in replies.items()
        for chain in reply.chains
    ]
    columns = (
        Column("store", "store", left=True, widest=11),
        Column("last block", "key", left=True, widest=KEY_DIGITS),
        Column("tokens", "tokens"),
        Column("blocks", "blocks"),
        Column("own", "own_blocks"),
        Column("size", "bytes"),
        Column("refs", "references"),
        Column("pin", "pin", left=True),
        Column("tenant", "tenant", left=True, widest=8),
    )
    left_out = {node_id: reply.total - len(reply.chains) for node_id, reply in replies.items() if reply.total > len(reply.chains)}
    notes = [f"{node_id}: {count} more; raise --limit" for node_id, count in left_out.items()]
    _show(rows, columns, as_json, notes, "nothing is held")


def show_stats(replies: Mapping[str, pb.StatReply], as_json: bool) -> None:
    rows = [_stat_row(node_id, reply) for node_id, reply in replies.items()]
    columns = (
        Column("store", "store", left=True, widest=11),
        Column("arena", "bytes_total"),
        Column("slots", "slots_total"),
        Column("free", "slots_free"),
        Column("cached", "slots_cached"),
        Column("in use", "slots_in_use"),
        Column("quar.", "slots_quarantined"),
        Column("pinned", "blocks_pinned"),
        Column("hits", "hit_rate"),
    )
    _show(rows, columns, as_json)
    on_ssd = [{"store": row["store"], "bytes_per_slot": row["bytes_per_slot"], **row["ssd"]} for row in rows if row["ssd"] is not None]
    if not as_json and on_ssd:
        _show(on_ssd, _SSD_COLUMNS, as_json=False)
    tenants = [tenant for row in rows for tenant in row["tenants"]]
    if not as_json and any(tenant["tenant"] or tenant["quota_slots"] is not None for tenant in tenants):
        _show(tenants, _TENANT_COLUMNS, as_json=False)


_SSD_COLUMNS = (
    Column("store", "store", left=True, widest=11),
    Column("SSD", "state", left=True),
    Column("blocks", "blocks"),
    Column("free", "free_blocks"),
    Column("size", "bytes_total"),
    Column("missed", "missed"),
    Column("dropped", "dropped_blocks"),
    Column("us/block", "read_us_per_block"),
)
_TENANT_COLUMNS = (
    Column("store", "store", left=True, widest=11),
    Column("tenant", "tenant", left=True, widest=24),
    Column("slots", "slots"),
    Column("evictable", "slots_cached"),
    Column("quota", "quota_slots"),
)


def _stat_row(node_id: str, reply: pb.StatReply) -> TableRow:
    return {
        "store": node_id,
        "bytes_total": reply.slots_total * reply.bytes_per_slot,
        "bytes_per_slot": reply.bytes_per_slot,
        **{name: getattr(reply, name) for name in ("slots_total", "slots_free", "slots_cached", "slots_in_use", "slots_quarantined")},
        "blocks_pinned": reply.blocks_hard_pinned + reply.blocks_soft_pinned,
        **{name: getattr(reply, name) for name in ("blocks_hard_pinned", "blocks_soft_pinned", "hard_pin_limit", "pins", "leases")},
        "hit_rate": reply.hits_blocks / reply.lookups_blocks if reply.lookups_blocks else 0.0,
        **{name: getattr(reply, name) for name in ("lookups_blocks", "hits_blocks", "bytes_read", "bytes_written")},
        **{name: getattr(reply, name) for name in ("sequence", "watchers", "watchers_cut_off")},
        "slots_free_or_spare": reply.slots_free_or_spare,
        "ssd": _ssd_row(reply.ssd, reply.bytes_per_slot) if reply.HasField("ssd") else None,
        "tenants": [
            {
                "store": node_id,
                "tenant": usage.tenant,
                "slots": usage.slots,
                "slots_cached": usage.slots_cached,
                "quota_slots": usage.quota_slots if usage.HasField("quota_slots") else None,
            }
            for usage in reply.tenants
        ],
    }


def _ssd_row(ssd: pb.SsdStat, bytes_per_slot: int) -> TableRow:
    return {
        "bytes_total": ssd.capacity_blocks * bytes_per_slot,
        **{
            name: getattr(ssd, name)
            for name in ("state", "blocks", "free_blocks", "capacity_blocks", "missed", "read_us_per_block", "direct")
        },
        "dropped": dict(ssd.dropped),
        "dropped_blocks": sum(ssd.dropped.values()),
    }


def show_pins(pins: Mapping[str, Sequence[pb.PinInfo]], as_json: bool) -> None:
    rows = [
        {
            "store": node_id,
            "pin_id": pin.pin_id,
            "kind": _PINS[pin.kind],
            "blocks": pin.blocks,
            "ttl_s": pin.ttl_ms / 1000,
            "tenant": pin.tenant,
        }
        for node_id, held in pins.items()
        for pin in held
    ]
    columns = (
        Column("store", "store", left=True, widest=11),
        Column("pin", "pin_id", left=True, widest=28),
        Column("kind", "kind", left=True),
        Column("blocks", "blocks"),
        Column("ends in", "ttl_s"),
        Column("tenant", "tenant", left=True, widest=12),
    )
    _show(rows, columns, as_json, empty="nothing is pinned")


def show_evictions(replies: Mapping[str, pb.EvictReply], as_json: bool) -> None:
    rows = [
        {"store": node_id, "evicted": reply.blocks, "from_ssd": reply.ssd_blocks, "kept": reply.kept_blocks}
        for node_id, reply in replies.items()
    ]
    columns = (Column("store", "store", left=True), Column("evicted", "evicted"), Column("from SSD", "from_ssd"), Column("kept", "kept"))
    kept = "what is in use or pinned is kept, and what it continues" if any(row["kept"] for row in rows) else None
    _show(rows, columns, as_json, [kept] if kept else [])


def show_verdicts(replies: Mapping[str, pb.VerifyReply], as_json: bool) -> None:
    rows = [
        {
            "store": node_id,
            "verdict": reply.problem or "sound",
            "slots": reply.slots,
            "blocks": reply.blocks,
            "ssd_blocks": reply.ssd_blocks,
            "elapsed_ms": round(reply.elapsed_ms, 1),
        }
        for node_id, reply in replies.items()
    ]
    columns = (
        Column("store", "store", left=True, widest=11),
        Column("slots", "slots"),
        Column("blocks", "blocks"),
        Column("read from SSD", "ssd_blocks"),
        Column("ms", "elapsed_ms"),
        Column("verdict", "verdict", left=True),
    )
    _show(rows, columns, as_json)


def _show(rows: Sequence[TableRow], columns: Sequence[Column], as_json: bool, notes: Sequence[str] = (), empty: str = "nothing") -> None:
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    console = Console(highlight=False)
    if not rows:
        console.print(empty)
        return
    table = Table(box=box.SIMPLE, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column.title, justify="left" if column.left else "right", no_wrap=column.title != "verdict")
    for row in rows:
        table.add_row(*(_cell(column, row[column.field]) for column in columns))
    console.print(table)
    for note in notes:
        console.print(escape(note))


def _cell(column: Column, value: Any) -> str:
    if value is None:
        return "-"
    if column.field in ("bytes", "bytes_total"):
        return _size(value)
    if column.field == "hit_rate":
        return f"{value:.1%}"
    if column.field == "ttl_s":
        return _duration(value)
    text = str(value)
    if column.widest is not None and len(text) > column.widest:
        text = text[: column.widest] if column.field == "key" else text[: column.widest - 1] + "…"
    return escape(text)


def _size(num_bytes: int) -> str:
    size, unit = float(num_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.4g} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
