"""What the Conductor tells Prometheus."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from prometheus_client import Counter, Gauge, Histogram

from conductor.core.conductor import ConductorCore
from conductor.core.types.events import Decided, PrefillFinished, Scored
from springtide.metrics import NamedSeries
from springtide.protocol.instances import Role
from springtide.protocol.scheduling import Reason, Rejection
from springtide.telemetry import LATENCY_BUCKETS_S

DECISIONS = Counter(
    "springtide_conductor_decisions_total", "Requests scheduled or rejected, or that found no idle capacity and ask again.", ["outcome"]
)
REJECTIONS = Counter("springtide_conductor_rejections_total", "Requests rejected, by reason.", ["reason"])
DECISION_SECONDS = Histogram(
    "springtide_conductor_decision_seconds",
    "Time to decide on one request.",
    buckets=(2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 5e-2, 0.1),
)
PROMPT_TOKENS = Counter("springtide_conductor_prompt_tokens_total", "Prompt tokens of scheduled requests.")
MATCHED_TOKENS = Counter(
    "springtide_conductor_matched_tokens_total",
    "Prompt tokens predicted to be reused, by where they lie; awaited: another prompt there computes them.",
    ["where"],
)
PLACEMENTS = Counter(
    "springtide_conductor_placements_total",
    "Placements by the branch of Algorithm 1 that made them; await: for what another prompt computes.",
    ["branch"],
)
PREDICTED_TTFT_SECONDS = Histogram(
    "springtide_conductor_predicted_ttft_seconds",
    "Predicted time to first token of each request, those that were refused for it included.",
    buckets=LATENCY_BUCKETS_S,
)
TTFT_ERROR_SECONDS = Histogram(
    "springtide_conductor_ttft_error_seconds",
    "By how much the first token came later, or earlier, than predicted.",
    ["than_predicted"],
    buckets=(0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
)
PREDICTION_RATIO = Histogram(
    "springtide_conductor_prediction_ratio",
    "Predicted over actual, by what was predicted.",
    ["quantity"],
    buckets=(0.1, 0.2, 0.4, 0.6, 0.8, 0.9, 1, 1.1, 1.25, 1.67, 2.5, 5, 10),
)
POOL_LOAD = Gauge("springtide_conductor_pool_load", "Mean load of a pool, 1 being as much as the objectives allow.", ["role"])
POOL_WORK = Gauge(
    "springtide_conductor_pool_work", "Instances of a role that the predicted work of the last half minute would keep busy.", ["role"]
)
POOL_WANTED = Gauge(
    "springtide_conductor_pool_wanted",
    "Of the ready instances, those that should have the role by the work of the last minutes; not where some have both.",
    ["role"],
)
POOL_RUNNING = Gauge("springtide_conductor_pool_attempts_running", "Attempts that a pool computes.", ["role"])
POOL_WAITING = Gauge("springtide_conductor_pool_attempts_waiting", "Attempts that wait in a pool.", ["role"])
KV_USED = Gauge(
    "springtide_conductor_kv_used_ratio",
    "Share of a pool's KV slots that attempts hold or are promised; above 1: more than there is.",
    ["role"],
)
QUEUED_PREFILL_TOKENS = Gauge("springtide_conductor_queued_prefill_tokens", "Prompt tokens that prefill groups have still to compute.")
DECODE_CONTEXT_TOKENS = Gauge("springtide_conductor_decode_context_tokens", "Tokens of context in the batches of the decode nodes.")
DECODE_TBT_SECONDS = Gauge("springtide_conductor_decode_tbt_seconds", "Time between tokens that is predicted of them, mean over the nodes.")
ROLE_SWITCHES = Counter("springtide_conductor_role_switches_total", "Instances told to switch their role.", ["to", "outcome"])
REPLICATIONS = Counter("springtide_conductor_replications_total", "Copies of popular prefixes, by how their orders ended.", ["outcome"])
REPLICATED_BYTES = Counter("springtide_conductor_replicated_bytes_total", "Copied by these orders.")
REPLICATIONS_IN_FLIGHT = Gauge("springtide_conductor_replications_in_flight", "Such orders that have not ended.")
INDEX_BLOCKS = Gauge("springtide_conductor_index_blocks", "Entries of the prefix index.")
LOAD_REPORTS = Counter("springtide_conductor_load_reports_total", "Load reports of engines taken in; of those that wait the newest counts.")
INSTANCES = Gauge("springtide_conductor_instances", "Known instances.", ["role", "ready"])
ATTEMPTS = Gauge("springtide_conductor_attempts", "Attempts in flight.")
HUNG = Gauge("springtide_conductor_hung_instances", "Instances that are silent or make no headway, and whose work others could do.")
SILENCES = Counter(
    "springtide_conductor_silences_total",
    "Times that an engine or a store that was followed was lost because it was silent or made no headway.",
    ["node_id", "role"],
)
TICK_SECONDS = Histogram(
    "springtide_conductor_tick_seconds",
    "Time of a look at the whole cluster, which is taken once a second, in parts between which requests have their turn.",
    buckets=(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1),
)
IS_LEADER = Gauge("springtide_conductor_is_leader", "1 while this Conductor is the one that answers.")
LEADER_EPOCH = Gauge("springtide_conductor_leader_epoch", "The highest leadership epoch known here; 0 when there is one Conductor only.")
LEADERSHIP_CHANGES = Counter("springtide_conductor_leadership_changes_total", "Times that this Conductor's leadership changed.", ["change"])
UNRECORDED_EVENTS = Counter("springtide_conductor_unrecorded_events_total", "Events after the end of a record that could not go on.")
SNAPSHOTS_REQUESTED = Counter("springtide_conductor_snapshots_requested_total", "Times that events of a store were missed.", ["node_id"])


_nodes = NamedSeries(256)


def count_silence(node_id: str, role: str) -> None:
    """Counts it. The series outlives the store's: it is lost with the silence, and that is when somebody looks."""
    _nodes.counter(SILENCES, node_id, role).inc()


def forget_node(node_id: str) -> None:
    """Ends the series of a node that is gone: there would be one for each node that ever was."""
    with contextlib.suppress(KeyError):
        SNAPSHOTS_REQUESTED.remove(node_id)


def observe_decided(decided: Decided, seconds: float, block_tokens: int, num_tokens: int) -> None:
    DECISION_SECONDS.observe(seconds)
    if decided.predicted_ttft_ms is not None:
        PREDICTED_TTFT_SECONDS.observe(decided.predicted_ttft_ms / 1000.0)
    if isinstance(decided.decision, Rejection):
        if decided.decision.reason is Reason.NOT_IDLE:
            DECISIONS.labels("not_idle").inc()
            return
        DECISIONS.labels("rejected").inc()
        REJECTIONS.labels(decided.decision.reason.value).inc()
        return
    prefill = decided.decision.prefill
    DECISIONS.labels("scheduled").inc()
    PLACEMENTS.labels(prefill.branch).inc()
    PROMPT_TOKENS.inc(num_tokens)
    MATCHED_TOKENS.labels("awaited" if prefill.branch == "await" else "local").inc(prefill.local_blocks * block_tokens)
    if prefill.source_id is not None:
        MATCHED_TOKENS.labels("remote").inc((prefill.source_blocks - prefill.local_blocks) * block_tokens)


def observe_prefill(finished: PrefillFinished) -> None:
    # Attempts that another Conductor placed carry no prediction.
    if finished.predicted_ttft_ms > 0 and finished.actual_ttft_ms > 0:
        error_s = (finished.actual_ttft_ms - finished.predicted_ttft_ms) / 1000.0
        TTFT_ERROR_SECONDS.labels("later" if error_s > 0 else "earlier").observe(abs(error_s))


def observe_scores(scored: Scored) -> None:
    for score in scored.scores:
        if score.actual > 0:
            PREDICTION_RATIO.labels(score.quantity.value).observe(score.predicted / score.actual)


def observe_cluster(core: ConductorCore, now: float) -> Generator[None, None, None]:
    """Sets what is seen of the whole cluster, a part at a time."""
    loads = yield from core.pool_loads(now)
    POOL_LOAD.labels("prefill").set(loads.prefill)
    POOL_LOAD.labels("decode").set(loads.decode)
    DECODE_TBT_SECONDS.set(loads.decode * core.settings.tbt_slo_ms / 1000.0)
    yield
    for role, tokens in ((Role.PREFILL, QUEUED_PREFILL_TOKENS), (Role.DECODE, DECODE_CONTEXT_TOKENS)):
        use = yield from core.pool_use(role)
        POOL_RUNNING.labels(role.value).set(use.running)
        POOL_WAITING.labels(role.value).set(use.waiting)
        KV_USED.labels(role.value).set(use.kv_used)
        tokens.set(use.tokens)
        yield
    REPLICATIONS_IN_FLIGHT.set(core.replication.in_flight)
    work = core.demand.recent_work(now)
    POOL_WORK.labels("prefill").set(work.prefill)
    POOL_WORK.labels("decode").set(work.decode)
    INDEX_BLOCKS.set(len(core.index))
    ATTEMPTS.set(len(core.state.attempts))
    ready = {role: core.scheduler.num_ready(role) for role in Role}
    for role, count in ready.items():
        INSTANCES.labels(role.value, "true").set(count)
        INSTANCES.labels(role.value, "false").set(sum(1 for _ in core.state.of_role(role)) - count)
    ratio = core.demand.work(now)
    if not core.scheduler.is_split:
        POOL_WANTED.clear()
        return
    for role in Role:
        if (wanted := ratio.wanted(role, sum(ready.values()))) is not None:
            POOL_WANTED.labels(role.value).set(wanted)
