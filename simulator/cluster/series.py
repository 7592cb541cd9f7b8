"""How things stood, every so often."""

from __future__ import annotations

from typing import Any

from conductor.core.conductor import ConductorCore
from simulator.cluster.records import Records
from springtide.protocol.instances import Role
from springtide.slices import at_once


class Series:
    """Load is measured as SLO satisfaction: 1 where what is predicted just meets the objective."""

    def __init__(self, conductor: ConductorCore, records: Records, interval_s: float) -> None:
        self._conductor = conductor
        self._records = records
        self._interval_s = interval_s
        self._columns: dict[str, list[float]] = {
            name: [] for name in ("time_s", "prefill_load", "decode_load", "prefill_queued", "decode_running", "hit_rate")
        }
        self._rejected: dict[str, list[int]] = {}

    def sample(self, now: float) -> None:
        columns = self._columns
        instances = self._conductor.state.instances.values()
        loads = at_once(self._conductor.pool_loads(now))
        columns["time_s"].append(now)
        columns["prefill_load"].append(loads.prefill)
        columns["decode_load"].append(loads.decode)
        columns["prefill_queued"].append(sum(i.load.running + i.load.waiting for i in instances if i.ref.role is Role.PREFILL))
        columns["decode_running"].append(sum(i.load.running for i in instances if i.ref.role is Role.DECODE))
        totals = self._conductor.totals
        columns["hit_rate"].append(totals.cached_tokens / max(totals.prompt_tokens, 1))
        for reason, count in self._records.num_rejected().items():
            self._rejected.setdefault(reason, [0] * (len(columns["time_s"]) - 1)).append(count)

    def to_json(self) -> dict[str, Any]:
        return {"interval_s": self._interval_s, **self._columns, "rejected": self._rejected}
