"""Prometheus metrics of a store process."""

from __future__ import annotations

from prometheus_client import Counter, Gauge, Histogram

from springtide.telemetry import LATENCY_BUCKETS_S

SLOTS = Gauge(
    "springtide_store_slots", "Slots by state: free, cached; of the arena: in_use, quarantined; of the SSD: retired", ["tier", "state"]
)
SLOT_BYTES = Gauge("springtide_store_slot_bytes", "Size of a slot: of a block in the layers that this store has", ["tier"])
LOOKUPS = Counter("springtide_store_lookup_blocks_total", "Blocks looked for in the index")
HITS = Counter("springtide_store_hit_blocks_total", "Blocks found in the index")
LOOKUP_TOKENS = Counter("springtide_store_lookup_tokens_total", "Tokens of the blocks looked for")
HIT_TOKENS = Counter("springtide_store_hit_tokens_total", "Tokens of the blocks found")
REUSED_TOKENS = Counter(
    "springtide_store_reused_tokens_total",
    "Tokens that an attempt found: in this store's DRAM, on its SSD, or at other stores (remote), from which they came",
    ["source"],
)
STORED = Counter("springtide_store_stored_blocks_total", "Blocks that entered the index", ["tier"])
REMOVED = Counter("springtide_store_removed_blocks_total", "Blocks evicted", ["tier"])
FETCHED_BYTES = Counter("springtide_store_fetched_bytes_total", "Bytes of prefix blocks read from peers")
FETCHED_BLOCKS = Counter("springtide_store_fetched_blocks_total", "Prefix blocks read from peers, complete in all layers")
FETCH_SECONDS = Histogram("springtide_store_fetch_seconds", "Duration of fetching a prefix", ["outcome"], buckets=LATENCY_BUCKETS_S)
REPLICATED_BLOCKS = Counter("springtide_store_replicated_blocks_total", "Blocks fetched by order of whoever places replicas")
LATE_READS = Counter("springtide_store_late_reads_total", "Reads of a prefix that took so long that another source was asked to help")
SOURCES_GIVEN_UP = Counter(
    "springtide_store_sources_given_up_total", "Sources of a prefix that were left for another: failed, slow", ["reason"]
)
HANDED_OVER_BYTES = Counter("springtide_store_handed_over_bytes_total", "Bytes of prompts written to decode nodes")
HAND_OVER_SECONDS = Histogram(
    "springtide_store_hand_over_seconds", "From the first question to the last byte of a hand-over", ["outcome"], buckets=LATENCY_BUCKETS_S
)
INGESTED_PROMPTS = Counter("springtide_store_ingested_prompts_total", "Prompts written by peers, by how it ended", ["outcome"])
LEASES = Gauge("springtide_store_leases", "Leases held by reading peers")
LEASES_EXPIRED = Counter("springtide_store_leases_expired_total", "Leases that ended without being released")
PINS = Gauge("springtide_store_pins", "Pins held")
PINNED_BLOCKS = Gauge("springtide_store_pinned_blocks", "Blocks under at least one pin of the kind", ["kind"])
TENANT_SLOTS = Gauge("springtide_store_tenant_slots", "Slots held by a tenant with a quota of its own", ["tenant"])
INGESTS = Gauge("springtide_store_ingests", "Attempts that a peer may write")
WRITERS_LOST = Counter("springtide_store_writers_lost_total", "Writing peers that were lost before they had closed")
WATCHERS = Gauge("springtide_store_watchers", "Subscribers of events")
WATCHERS_CUT_OFF = Counter("springtide_store_watchers_cut_off_total", "Subscribers that lagged too far")
SSD_STATE = Gauge("springtide_store_ssd_state", "1 for the state that the SSD tier is in: taking, disk_full, failing", ["state"])
SSD_WRITTEN_BYTES = Counter("springtide_store_ssd_written_bytes_total", "Bytes of blocks put into the SSD tier")
SSD_READ_BYTES = Counter("springtide_store_ssd_read_bytes_total", "Bytes of blocks got from the SSD tier, checksums right")
SSD_READ_SECONDS = Histogram(
    "springtide_store_ssd_read_seconds", "Duration of one reading of blocks from the SSD", buckets=LATENCY_BUCKETS_S
)
SSD_REFUSED = Counter("springtide_store_ssd_refused_blocks_total", "Blocks that the SSD tier had no room for, or could not write")
SSD_DEMOTED = Counter("springtide_store_ssd_demoted_blocks_total", "Blocks copied from the arena to the SSD")
SSD_PROMOTED = Counter("springtide_store_ssd_promoted_blocks_total", "Blocks read from the SSD into the arena")
SSD_MISSED = Counter("springtide_store_ssd_missed_blocks_total", "Blocks that left the arena before they could be copied to the SSD")
SSD_DECLINED = Counter(
    "springtide_store_ssd_declined_blocks_total", "Blocks on the SSD that were not read, as computing them anew was expected to be sooner"
)
SSD_DROPPED = Counter(
    "springtide_store_ssd_dropped_blocks_total", "Blocks that the SSD tier lost, by reason: torn, orphan, corrupt, disk_error", ["reason"]
)
