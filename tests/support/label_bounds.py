"""What bounds each label of each metric: how many values one process can show of it, whatever clients ask and nodes come and go."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cache
from http import HTTPStatus
from math import prod
from typing import get_args

import grpc

from conductor.core.types.estimates import BRANCHES
from conductor.core.types.events import Quantity
from deploy.commands.metrics_reference import EVERY, Described, all_metrics
from gateway.accounts.accounts import TokenKind
from gateway.anthropic.routes import MESSAGES
from gateway.bodies import ClientDisconnected
from gateway.caching.context import MissReason, Status
from gateway.gemini.routes import GENERATE, STREAM
from gateway.openai.responses import PATH as RESPONSES
from gateway.openai.routes import CHAT, COMPLETION
from gateway.tracing.tracer import Kept
from kvstore.ssd.health import TierState
from springtide.choices import TransportName
from springtide.membership import MemberRole
from springtide.protocol.instances import Role
from springtide.protocol.outputs import FailureCode, Finish
from springtide.protocol.scheduling import Reason
from springtide.protocol.storage import Tier

MOST_BUCKETS = 30
"""Of a histogram, with its sum and count."""


@dataclass(frozen=True, slots=True)
class Bound:
    most: int
    """How many values."""
    words: frozenset[str] = frozenset()
    """All that there can be, where they are known beforehand."""

    def holds(self, value: str) -> bool:
        """Whether it may be one of the values."""
        return not self.words or value in self.words


def words(*given: str) -> Bound:
    return Bound(len(given), frozenset(given))


def values(*kinds: type[Enum], more: tuple[str, ...] = ()) -> Bound:
    return words(*(str(each.value) for kind in kinds for each in kind), *more)


ONE = Bound(1)
"""What a process is, or serves: the same for as long as it lives."""
NAMED = Bound(257)
"""Of clients or nodes, of which there are ever new ones: those of a NamedSeries, and its OTHERS."""
NODES = Bound(1000)
"""There are as many as the cluster has, for those that are gone are forgotten: a thousand is what it is made for."""
CONFIGURED = Bound(1000)
"""As many as the configuration names."""
DEVICES, STAGES = Bound(16), Bound(64)
"""Of one machine; of one group."""

ROLES, TIERS = values(Role), values(Tier)
TRANSPORTS, DIRECTIONS = words(*get_args(TransportName)), words("read", "write")
ROUTES = words(*(endpoint.path for endpoint in (CHAT, COMPLETION, MESSAGES, GENERATE, STREAM)), RESPONSES, "grpc/Generate")
HTTP = (*(str(status.value) for status in HTTPStatus), str(ClientDisconnected.http_status))
STATUSES = words(*HTTP, *(code.name for code in grpc.StatusCode))
ENDED = words("complete", "failed")
OF_CORE = ("deadline", "request_too_large", "objective_unattainable", "no_capacity", "refused_at_admission", "node_lost", "no_progress")
FAILURES = values(Reason, more=tuple({*OF_CORE, "shutting_down", "none"} - {reason.value for reason in Reason}))
ENGINE = {"model_name": ONE, "engine": words("0")}

BOUNDS: Mapping[str, Mapping[str, Bound]] = {
    "springtide_build_info": {"version": ONE, "role": words(*EVERY)},
    "springtide_valkey_up": {"client": words("membership", "leader_lease")},
    "springtide_certificate_expiry_timestamp_seconds": {"certificate": words("cluster", "public")},
    "python_info": dict.fromkeys(("version", "implementation", "major", "minor", "patchlevel"), ONE),
    **{
        f"python_gc_{what}_total": {"generation": words("0", "1", "2")}
        for what in ("objects_collected", "objects_uncollectable", "collections")
    },
    # ---- gateways ----
    "springtide_gateway_requests_total": {"route": ROUTES, "status": STATUSES},
    "springtide_gateway_requests_in_flight": {"route": ROUTES},
    "springtide_gateway_client_disconnects_total": {"route": ROUTES},
    "vllm:num_incoming_requests_total": {"model": ONE},
    "springtide_gateway_rate_limited_total": {"kind": words("requests", *get_args(TokenKind))},
    "springtide_gateway_mark_misses_total": {"reason": values(MissReason)},
    "springtide_gateway_failed_attempts_total": {"instance_id": NAMED},
    "springtide_gateway_traces_total": {"decision": values(Kept, more=("left_out",))},
    "springtide_gateway_moves_total": {"outcome": words("moved", "given_up")},
    "springtide_gateway_generations_total": {"outcome": values(Finish, more=("failed", "cancelled"))},
    "springtide_gateway_failures_total": {"code": FAILURES},
    "springtide_gateway_slo_generations_total": {
        "tenant": NAMED,
        "objective": words("ttft", "tbt", "goodput"),
        "result": words("met", "missed"),
    },
    "springtide_gateway_slo_objective_seconds": {"objective": words("ttft", "tbt")},
    "springtide_gateway_tenant_tokens_total": {"tenant": NAMED, "kind": words("prompt", "cached", "output")},
    "springtide_gateway_context_caches": {"status": values(Status)},
    "springtide_gateway_context_cache_tokens": {"status": values(Status)},
    # ---- Conductors ----
    "springtide_conductor_decisions_total": {"outcome": words("scheduled", "rejected", "not_idle")},
    "springtide_conductor_rejections_total": {"reason": values(Reason)},
    "springtide_conductor_matched_tokens_total": {"where": words("local", "remote")},
    "springtide_conductor_placements_total": {"branch": words(*BRANCHES)},
    "springtide_conductor_ttft_error_seconds": {"than_predicted": words("later", "earlier")},
    "springtide_conductor_prediction_ratio": {"quantity": values(Quantity)},
    **{
        f"springtide_conductor_{what}": {"role": ROLES}
        for what in ("pool_load", "pool_work", "pool_wanted", "pool_attempts_running", "pool_attempts_waiting", "kv_used_ratio")
    },
    "springtide_conductor_role_switches_total": {"to": ROLES, "outcome": words("ordered", "failed")},
    "springtide_conductor_replications_total": {"outcome": words("done", "failed")},
    "springtide_conductor_instances": {"role": ROLES, "ready": words("true", "false")},
    "springtide_conductor_silences_total": {"node_id": NAMED, "role": words(*get_args(MemberRole))},
    "springtide_conductor_leadership_changes_total": {"change": words("gained", "lost")},
    "springtide_conductor_snapshots_requested_total": {"node_id": NODES},
    # ---- stores, and transfers ----
    "springtide_store_slots": {"tier": TIERS, "state": words("free", "cached", "in_use", "quarantined", "retired")},
    "springtide_store_slot_bytes": {"tier": TIERS},
    "springtide_store_reused_tokens_total": {"source": words("dram", "ssd", "remote")},
    "springtide_store_stored_blocks_total": {"tier": TIERS},
    "springtide_store_removed_blocks_total": {"tier": TIERS},
    "springtide_store_fetch_seconds": {"outcome": words("complete", "truncated", "late")},
    "springtide_store_sources_given_up_total": {"reason": words("failed", "slow")},
    "springtide_store_hand_over_seconds": {"outcome": ENDED},
    "springtide_store_ingested_prompts_total": {"outcome": ENDED},
    "springtide_store_pinned_blocks": {"kind": words("hard", "soft")},
    "springtide_store_tenant_slots": {"tenant": CONFIGURED},
    "springtide_store_ssd_state": {"state": values(TierState)},
    "springtide_store_ssd_dropped_blocks_total": {"reason": words("torn", "orphan", "corrupt", "disk_error")},
    "springtide_messenger_failures_total": {
        "transport": TRANSPORTS,
        "kind": words("connect", "peer_lost", "deadline", "invalid", "cancelled", "other"),
    },
    "springtide_messenger_rdma_paths": {"device": DEVICES},
    "springtide_messenger_rdma_paths_lost_total": {"device": DEVICES},
    **{f"springtide_messenger_{what}": {"transport": TRANSPORTS, "direction": DIRECTIONS} for what in ("bytes_total", "batches_total")},
    "springtide_messenger_batch_seconds": {"transport": TRANSPORTS, "direction": DIRECTIONS},
    # ---- engines ----
    "springtide_prefill_cached_tokens_total": {"source": words("local", "fetched")},
    "springtide_prefill_transfer_seconds_total": {"transfer": words("fetch", "hand_over"), "part": words("hidden", "waited")},
    "springtide_prefill_stage_busy_seconds_total": {"stage": STAGES},
    "springtide_prefill_failures_total": {"code": values(FailureCode)},
    "springtide_decode_failures_total": {"code": values(FailureCode)},
    **{
        f"vllm:{name}": ENGINE
        for name in (
            *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
            *("prompt_tokens_total", "prompt_tokens_cached_total", "generation_tokens_total"),
            *("spec_decode_num_drafts_total", "spec_decode_num_draft_tokens_total", "spec_decode_num_accepted_tokens_total"),
            *("prefix_cache_queries_total", "prefix_cache_hits_total"),
            *("external_prefix_cache_queries_total", "external_prefix_cache_hits_total"),
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds"),
            *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
        )
    },
    "vllm:cache_config_info": {
        "engine": words("0"),
        **dict.fromkeys(("block_size", "cache_dtype", "enable_prefix_caching", "num_gpu_blocks"), ONE),
    },
    "vllm:prompt_tokens_by_source_total": {**ENGINE, "source": words("local_compute", "local_cache_hit", "external_kv_transfer")},
    "vllm:request_success_total": {**ENGINE, "finished_reason": words("stop", "length", "abort", "error", "repetition")},
}
"""Of each metric that has labels."""


def most_series(metric: Described) -> int:
    """That one process can have of it."""
    of_each = MOST_BUCKETS if metric.type == "histogram" else 1
    return of_each * prod(bound.most for bound in BOUNDS.get(metric.name, {}).values())


def unbounded(sample: str, labels: Mapping[str, str]) -> list[str]:
    """Which labels have a value that they cannot have, of a sample by its name. Those that targets have are nobody's here."""
    metric = metrics_by_sample().get(sample)
    bounds = BOUNDS.get(metric.name, {}) if metric is not None else {}
    return [f"{name}={value}" for name, value in labels.items() if name in bounds and not bounds[name].holds(value)]


@cache
def metrics_by_sample() -> dict[str, Described]:
    """All that the project serves, by the names of samples."""
    return {sample: metric for metric in all_metrics().values() for sample in metric.samples}
