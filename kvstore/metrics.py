"""Prometheus metrics of a store process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from springtide.telemetry import LATENCY_BUCKETS_S

SLOTS = Gauge("springtide_store_slots", "Slots of the arena by state: free, cached, in_use, quarantined", ["tier", "state"])
LOOKUPS = Counter("springtide_store_lookup_blocks_total", "Blocks looked for in the index")
HITS = Counter("springtide_store_hit_blocks_total", "Blocks found in the index")
LOOKUP_TOKENS = Counter("springtide_store_lookup_tokens_total", "Tokens of the blocks looked for")
HIT_TOKENS = Counter("springtide_store_hit_tokens_total", "Tokens of the blocks found")
STORED = Counter("springtide_store_stored_blocks_total", "Blocks that entered the index", ["tier"])
REMOVED = Counter("springtide_store_removed_blocks_total", "Blocks evicted", ["tier"])
FETCHED_BYTES = Counter("springtide_store_fetched_bytes_total", "Bytes of prefix blocks read from peers")
FETCHED_BLOCKS = Counter("springtide_store_fetched_blocks_total", "Prefix blocks read from peers, complete in all layers")
FETCH_SECONDS = Histogram("springtide_store_fetch_seconds", "Duration of fetching a prefix", ["outcome"], buckets=LATENCY_BUCKETS_S)
HANDED_OVER_BYTES = Counter("springtide_store_handed_over_bytes_total", "Bytes of prompts written to decode nodes")
HAND_OVER_SECONDS = Histogram(
    "springtide_store_hand_over_seconds", "From the first question to the last byte of a hand-over", ["outcome"], buckets=LATENCY_BUCKETS_S
)
INGESTED_PROMPTS = Counter("springtide_store_ingested_prompts_total", "Prompts written by peers, by how it ended", ["outcome"])
LEASES = Gauge("springtide_store_leases", "Leases held by reading peers")
LEASES_EXPIRED = Counter("springtide_store_leases_expired_total", "Leases that ended without being released")
INGESTS = Gauge("springtide_store_ingests", "Attempts that a peer may write")
WRITERS_LOST = Counter("springtide_store_writers_lost_total", "Writing peers that were lost before they had closed")
WATCHERS = Gauge("springtide_store_watchers", "Subscribers of events")
WATCHERS_CUT_OFF = Counter("springtide_store_watchers_cut_off_total", "Subscribers that lagged too far")
