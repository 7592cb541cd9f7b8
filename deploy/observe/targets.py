"""Whom Prometheus is to scrape, of the members of a cluster: who comes is added, who leaves is left out, and who is lost stays for a while,
so that it is seen to be down. Free of I/O and clock."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from springtide.membership import Member

KEEP_LOST_S = 600.0
"""How long who was lost is still asked for."""
_LOOK_S = 0.5
"""A lease that had less left at the last look may be over by the next."""
_ROLES = ("conductor", "gateway", "decode", "prefill", "stage", "store", "layer-store")
"""Of members that share a process, the first is what it is called."""


@dataclass(frozen=True, slots=True)
class Target:
    """A process that serves metrics."""

    name: str
    """As its log is called; the same when it starts anew."""
    role: str
    address: str


@dataclass(slots=True)
class _Known:
    target: Target
    lease_until: float
    lost_at: float | None = None


class Targets:
    """All that are known. Times are seconds on the caller's clock."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._known: dict[str, _Known] = {}

    def see(self, members: Sequence[tuple[Member, float]], now: float) -> None:
        """These are listed, each with the seconds that its lease has left. A list of nobody is taken for one that was lost."""
        if not members:
            return
        listed = {target.name: (target, left_s) for target, left_s in _by_process(members)}
        for name, (target, left_s) in listed.items():
            self._known[name] = _Known(target, now + left_s)
        for name, known in list(self._known.items()):
            if name in listed:
                continue
            if known.lost_at is None and now < known.lease_until - _LOOK_S:
                del self._known[name]  # it has withdrawn: nothing else ends a lease before its time
            elif known.lost_at is None:
                known.lost_at = now
            elif now - known.lost_at > KEEP_LOST_S:
                del self._known[name]

    def as_file(self) -> str:
        """For `file_sd_configs`."""
        groups = [self._group(known.target) for _, known in sorted(self._known.items())]
        return json.dumps(groups, indent=1) + "\n"

    def _group(self, target: Target) -> dict[str, Any]:
        labels = {"cluster": self._cluster, "instance": target.name, "springtide_role": target.role}
        return {"targets": [target.address], "labels": labels}


def _by_process(members: Sequence[tuple[Member, float]]) -> Sequence[tuple[Target, float]]:
    """A Conductor and a gateway that are one process have one page of metrics, and are one target; so has an engine that prefills and
    decodes, which is called an instance."""
    found: dict[str, tuple[Target, float]] = {}
    prefill = {member.metrics_address for member, _ in members if member.role == "prefill"}
    for member, left_s in sorted(members, key=lambda item: _ROLES.index(item[0].role)):
        if member.metrics_address and member.metrics_address not in found:
            name = f"{member.member_id}-store" if member.role in ("store", "layer-store") else member.member_id
            role = "instance" if member.role == "decode" and member.metrics_address in prefill else member.role
            found[member.metrics_address] = Target(name, role, member.metrics_address), left_s
    return list(found.values())
