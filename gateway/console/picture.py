"""The picture of the cluster that a gateway has for all who watch there, and what of it each of them may see. Free of I/O and clock."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gateway.caching.context import ContextCache
from gateway.console.deltas import Row, Table, Tables
from springtide.ids import InstanceId, engine_of
from springtide.protocol.attempts import Prediction
from springtide.protocol.instances import Role
from springtide.protocol.observation import (
    BUCKET_S,
    MOST_BUCKETS,
    AttemptTable,
    DecisionTable,
    HistoryTable,
    InstanceTable,
    Observe,
    ObservedAttempt,
    ObservedDecision,
    ObservedPart,
    ObservedPrefix,
    Overview,
    PrefixTable,
    StoreTable,
    TimeBucket,
)
from springtide.protocol.scheduling import Estimate

MOST_DECISIONS, MOST_REFUSALS = 1024, 256
"""That a gateway remembers."""
SHOWN_DECISIONS, SHOWN_REFUSALS = 150, 100
"""That a viewer is sent, the latest."""
MANY_INSTANCES, EVERY = 256, 5
"""Beyond so many, the figures of each are brought up to date every so many-th time."""
_SAME_CLOCK_S = 2.0

# Places in the row of an instance.
ROLE, NODE, READY, LOAD, RUNNING, WAITING, IDLE, QUEUE_MS, STEP_MS, SLOTS, SLOTS_USED, SILENT_S = range(12)


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who watches: an operator, or a tenant."""

    tenant: str
    operator: bool

    @property
    def key(self) -> str | None:
        """Equal for those who see the same."""
        return None if self.operator else self.tenant

    def sees(self, tenant: str) -> bool:
        return self.operator or tenant == self.tenant


class Picture:
    """What a Conductor last showed. Parts are taken in as they come, and count when all of an answer is there."""

    def __init__(self) -> None:
        self.problem = "nothing has been heard of the Conductor yet"
        """Why it is not up to date; empty: it is."""
        self.taken_at = 0.0
        """When the last whole answer came, Unix seconds."""
        self._overview: Overview | None = None
        self._coming: Overview | None = None
        self._offset_s = 0.0
        """From the Conductor's clock to Unix time: the same from one answer to the next, or every time would have changed."""
        self._instances: Table = {}
        self._pools: dict[str, Row] = {}
        self._engines: Row = {}
        self._stores: Table = {}
        self._attempts: Table = {}
        self._prefixes: Table = {}
        self._decisions: Table = {}
        self._refusals: Table = {}
        self._history: Table = {}
        self._caches: Table = {}
        self._newest_bucket = 0
        self._turn = 0

    # ---- what comes ----

    @property
    def asks(self) -> Observe:
        """For what is new since."""
        if self._overview is None:
            return Observe()
        return Observe(self._overview.history, self._overview.version, self._newest_bucket)

    def begin(self) -> None:
        """An answer begins; what came of one that did not end is dropped."""
        self._coming = None
        self._next: dict[str, Table] = {name: {} for name in ("instances", "stores", "attempts", "prefixes")}

    def take(self, part: ObservedPart, now: float) -> None:
        """Part of an answer, the Overview first. `now`: Unix seconds."""
        match part:
            case Overview():
                self._begin_with(part, now)
            case InstanceTable():
                self._next["instances"].update(zip(part.instance_ids, map(list, _instance_rows(part)), strict=True))
            case StoreTable():
                rows = zip(part.dram_blocks, part.ssd_blocks, strict=True)
                self._next["stores"].update(zip(part.node_ids, map(list, rows), strict=True))
            case AttemptTable():
                self._next["attempts"].update((attempt.attempt_id, self._attempt(attempt)) for attempt in part.attempts)
            case PrefixTable():
                self._next["prefixes"].update((prefix.key.hex(), _prefix(prefix)) for prefix in part.prefixes)
            case DecisionTable():
                for decision in reversed(part.decisions):
                    self._take_decision(decision)
            case HistoryTable():
                for bucket in part.buckets:
                    self._history[str(bucket.number)] = self._bucket(bucket)
                    self._newest_bucket = max(self._newest_bucket, bucket.number)

    def complete(self, now: float) -> None:
        """The answer is whole."""
        assert self._coming is not None, "an answer begins with the Overview"
        self._overview, self.problem, self.taken_at = self._coming, "", now
        self._turn += 1
        self._instances = self._paced(self._next["instances"])
        self._pools = {role.value: self._pool(role) for role in Role}
        self._engines = _engines(self._instances)
        self._stores, self._attempts, self._prefixes = (self._next[name] for name in ("stores", "attempts", "prefixes"))
        for table, most in ((self._decisions, MOST_DECISIONS), (self._refusals, MOST_REFUSALS)):
            for key in list(table)[: max(0, len(table) - most)]:
                del table[key]
        for key in [key for key in self._history if int(key) <= self._newest_bucket - MOST_BUCKETS]:
            del self._history[key]

    def lost(self, problem: str) -> None:
        """No answer came."""
        self.problem = problem

    def take_caches(self, caches: Iterable[ContextCache], now: float) -> None:
        self._caches = {f"{cache.tenant}/{cache.cache_id}": _cache(cache, now) for cache in caches}

    def _begin_with(self, overview: Overview, now: float) -> None:
        if self._overview is None or overview.history != self._overview.history:
            for table in (self._decisions, self._refusals, self._history):
                table.clear()
            self._newest_bucket = 0
            self._offset_s = now - overview.now
        elif abs(now - overview.now - self._offset_s) > _SAME_CLOCK_S:
            self._offset_s = now - overview.now
        self._coming = overview

    def _take_decision(self, decision: ObservedDecision) -> None:
        table = self._decisions if decision.reason is None else self._refusals
        # Those that have changed go to the end: the others are forgotten first.
        table.pop(decision.attempt_id, None)
        table[decision.attempt_id] = self.decision(decision)

    def _paced(self, instances: Table) -> Table:
        if len(instances) <= MANY_INSTANCES:
            return instances
        paced: Table = {}
        for number, (name, row) in enumerate(instances.items()):
            known = self._instances.get(name)
            due = known is None or number % EVERY == self._turn % EVERY or row[: READY + 1] != known[: READY + 1]
            paced[name] = row if due else known
        return paced

    # ---- what is shown ----

    def head(self, viewer: Viewer) -> dict[str, Any]:
        """The cluster as a whole."""
        head: dict[str, Any] = {
            "problem": self.problem,
            "taken_at": round(self.taken_at, 1),
            "viewer": {"tenant": viewer.tenant if not viewer.operator else "", "operator": viewer.operator},
        }
        if self._overview is None:
            return head
        return {**head, **_overview(self._overview), "pools": self._pools, "engines": self._engines}

    def tables(self, viewer: Viewer) -> Tables:
        """What the viewer may see."""
        slots = {row[NODE]: row[SLOTS] for row in self._instances.values()}
        return {
            "instances": self._instances,
            "stores": {node_id: [*row, slots.get(node_id, 0)] for node_id, row in self._stores.items()},
            "history": dict(self._history),
            "attempts": _own(viewer, self._attempts),
            "decisions": _latest(_own(viewer, self._decisions), SHOWN_DECISIONS),
            "refusals": _latest(_own(viewer, self._refusals), SHOWN_REFUSALS),
            "prefixes": _own(viewer, self._prefixes),
            "caches": _own(viewer, self._caches),
        }

    def _pool(self, role: Role) -> Row:
        rows = [row for row in self._instances.values() if row[ROLE] == role.value]
        return {
            "instances": len(rows),
            "ready": sum(row[READY] for row in rows),
            "load": _spread([row[LOAD] for row in rows]),
            "running": sum(row[RUNNING] for row in rows),
            "waiting": sum(row[WAITING] for row in rows),
            "idle": sum(row[IDLE] for row in rows),
            "queue_ms": _spread([row[QUEUE_MS] for row in rows]),
            "step_ms": _spread([row[STEP_MS] for row in rows]),
            "slots": sum(row[SLOTS] for row in rows),
            "slots_used": sum(row[SLOTS_USED] for row in rows),
        }

    # ---- rows ----

    def decision(self, told: ObservedDecision) -> Row:
        """As the page has it."""
        return {
            "request": told.request_id,
            "tenant": told.tenant,
            "gateway": told.gateway_id.partition(":")[0],
            "at": self._unix(told.decided_at),
            "tokens": told.num_tokens,
            "idle": told.idle,
            "prefill": told.prefill_id,
            "decode": told.decode_id,
            "branch": told.branch,
            "local_blocks": told.local_blocks,
            "source": told.source_id,
            "source_blocks": told.source_blocks,
            "waits": told.waits,
            "reason": told.reason.value if told.reason is not None else "",
            "message": told.message,
            "retry_after_s": _short(told.retry_after_s),
            "phase": told.phase.name.lower() if told.phase is not None else "",
            "first": self._unix(told.first_token_at),
            "ended": self._unix(told.ended_at),
            "predicted": _predicted(told.prediction),
            "actual": {
                "ttft_ms": _short(told.ttft_ms),
                "queue_ms": _short(told.queue_ms),
                "transfer_ms": _short(told.fetch_ms),
                "prefill_ms": _short(told.prefill_ms),
                "tbt_ms": _short(told.tbt_ms),
                "output_tokens": told.output_tokens,
                "cached_tokens": told.cached_tokens,
            },
        }

    def _attempt(self, attempt: ObservedAttempt) -> Row:
        return {
            "request": attempt.request_id or attempt.attempt_id.rpartition(".")[0],
            "tenant": attempt.tenant,
            "gateway": attempt.gateway_id.partition(":")[0],
            "prefill": attempt.prefill_id,
            "decode": attempt.decode_id,
            "phase": attempt.phase.name.lower(),
            "tokens": attempt.num_tokens,
            "idle": attempt.idle,
            "at": self._unix(attempt.placed_at),
            "first": self._unix(attempt.first_token_at),
            "predicted": _predicted(attempt.prediction),
        }

    def _bucket(self, bucket: TimeBucket) -> Row:
        latencies = (bucket.ttft_p50_ms, bucket.ttft_p90_ms, bucket.ttft_p99_ms, bucket.tbt_p50_ms, bucket.tbt_p90_ms, bucket.tbt_p99_ms)
        return [
            self._unix(bucket.number * BUCKET_S),
            *(bucket.placed, bucket.refused, bucket.finished, bucket.failed),
            *(bucket.prompt_tokens, bucket.cached_tokens, bucket.output_tokens),
            *(bucket.first_tokens, bucket.in_time),
            *map(_short, (*latencies, bucket.prefill_load, bucket.decode_load)),
            bucket.attempts,
        ]

    def _unix(self, at: float) -> float:
        """0 for never."""
        return round(at + self._offset_s, 2) if at else 0


def estimate_row(estimate: Estimate) -> Row:
    return {name: _short(value) if isinstance(value, float) else value for name, value in asdict(estimate).items()}


def _overview(overview: Overview) -> dict[str, Any]:
    status = overview.status
    return {
        "model": status.model,
        "ready": status.ready,
        "leads": status.leads,
        "epoch": status.epoch,
        "policy": overview.policy,
        "admission": overview.admission,
        "ttft_slo_ms": overview.ttft_slo_ms,
        "tbt_slo_ms": overview.tbt_slo_ms,
        "block_tokens": overview.block_tokens,
        "bytes_per_block": overview.bytes_per_block,
        "attempts": status.attempts_live,
        "attempts_in_prefill": overview.attempts_in_prefill,
        "scheduled": status.requests_scheduled,
        "refused": status.requests_rejected,
        "refused_by_reason": dict(status.rejections_by_reason),
        "prompt_tokens": status.prompt_tokens,
        "cached_tokens": status.cached_tokens,
        "index_blocks": status.index_blocks,
        "loads": {"prefill": _short(status.prefill_load), "decode": _short(status.decode_load)},
        "wanted_prefill": status.wanted_prefill,
        "switching": status.switching_instance_id,
        "predictions": [
            [row.quantity, row.count, _short(row.median_error), _short(row.p90_error), _short(row.bias)] for row in status.predictions
        ],
    }


def _engines(instances: Table) -> Row:
    """As people count them: how many do both, and how many have either role; of all of them, how many are away. Of one that does both the
    Conductor knows two instances."""
    sides: dict[InstanceId, list[Row]] = defaultdict(list)
    for name, row in instances.items():
        sides[engine_of(InstanceId(name))].append(row)
    counts = Counter("both" if len(rows) > 1 else rows[0][ROLE] for rows in sides.values())
    away = sum(not all(row[READY] for row in rows) for rows in sides.values())
    return {**{kind: counts[kind] for kind in ("both", *(role.value for role in Role))}, "away": away}


def _instance_rows(table: InstanceTable) -> Iterable[Sequence[Any]]:
    """With the places named above. Figures are cut to what is worth being sent again."""
    used = (total - available for total, available in zip(table.slots_total, table.slots_available, strict=True))
    return zip(
        (role.value for role in table.roles),
        table.node_ids,
        map(int, table.ready),
        map(_short, table.loads),
        table.running,
        table.waiting,
        table.idle,
        map(_short, table.queue_ms),
        map(_short, table.step_ms),
        table.slots_total,
        used,
        # Reports come twice a second: less says nothing.
        (int(seconds) if seconds >= 2 else 0 for seconds in table.seconds_since_report),
        strict=True,
    )


def _prefix(prefix: ObservedPrefix) -> Row:
    return {
        "tenant": prefix.tenant,
        "blocks": prefix.blocks,
        "asks": _short(prefix.asks),
        "holders": prefix.num_holders,
        "whole": prefix.num_whole,
        "nodes": [list(row) for row in zip(prefix.node_ids, prefix.held, prefix.held_in_dram, strict=True)],
    }


def _cache(cache: ContextCache, now: float) -> Row:
    return {
        "id": cache.cache_id,
        "tenant": cache.tenant,
        "name": cache.name,
        "tokens": cache.tokens,
        "blocks": cache.blocks,
        "status": cache.status(now).value,
        "error": cache.kept.error,
        "strength": cache.strength.value,
        "replicas": cache.replicas,
        "nodes": sorted(cache.kept.held),
        "expires_at": round(cache.expires_at),
    }


def _predicted(prediction: Prediction | None) -> Row:
    if prediction is None:
        return None
    return {
        "ttft_ms": _short(prediction.ttft_ms),
        "queue_ms": _short(prediction.queue_ms),
        "transfer_ms": _short(prediction.transfer_ms),
        "prefill_ms": _short(prediction.prefill_ms),
        "tbt_ms": _short(prediction.tbt_ms),
        "output_tokens": round(prediction.output_tokens),
    }


def _own(viewer: Viewer, table: Table) -> Table:
    return table if viewer.operator else {key: row for key, row in table.items() if viewer.sees(row["tenant"])}


def _latest(table: Table, count: int) -> Table:
    keys = list(table)[-count:]
    return {key: table[key] for key in keys}


def _spread(values: Sequence[float]) -> Mapping[str, float]:
    """Of what is there."""
    if not values:
        return {"mean": 0, "p90": 0, "max": 0}
    ordered = sorted(values)
    return {"mean": _short(sum(ordered) / len(ordered)), "p90": ordered[int(0.9 * (len(ordered) - 1))], "max": ordered[-1]}


def _short(value: float) -> float:
    """Three digits."""
    if not value:
        return 0
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short
