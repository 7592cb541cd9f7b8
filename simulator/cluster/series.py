"""How things stood, every so often."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from conductor.core.events import Role

if TYPE_CHECKING:
    from simulator.cluster.cluster import Cluster


class Series:
    """Load is measured as SLO satisfaction: 1 where what is predicted just meets the objective."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._columns: dict[str, list[float]] = {
            name: [] for name in ("time_s", "prefill_load", "decode_load", "prefill_queued", "decode_running", "hit_rate")
        }
        self._rejected: dict[str, list[int]] = {}

    def sample(self) -> None:
        cluster, columns = self._cluster, self._columns
        now = cluster.loop.now
        instances = cluster.conductor.state.instances.values()
        loads = cluster.conductor.pool_loads(now)
        columns["time_s"].append(now)
        columns["prefill_load"].append(loads.prefill)
        columns["decode_load"].append(loads.decode)
        columns["prefill_queued"].append(sum(i.load.running + i.load.waiting for i in instances if i.ref.role is Role.PREFILL))
        columns["decode_running"].append(sum(i.load.running for i in instances if i.ref.role is Role.DECODE))
        totals = cluster.conductor.totals
        columns["hit_rate"].append(totals.cached_tokens / max(totals.prompt_tokens, 1))
        for reason, count in cluster.records.num_rejected().items():
            self._rejected.setdefault(reason, [0] * (len(columns["time_s"]) - 1)).append(count)

    def to_json(self) -> dict[str, Any]:
        return {"interval_s": self._cluster.options.sample_every_s, **self._columns, "rejected": self._rejected}
