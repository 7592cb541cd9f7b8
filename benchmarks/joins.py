"""Machines that join through a cluster's head as `springtide node --join` does: with a token, certificates of their own, and over TLS. A
part of `make bench-fleet`; `python -m benchmarks.joins --machines 20` tries it."""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

from benchmarks.driven import on_cores, plain
from benchmarks.played_cluster import START_S, processor_s
from benchmarks.results import Row, show
from deploy.ca.authority import Authority, new_request
from deploy.ca.identity import Identity
from deploy.join import client
from deploy.join.tokens import Token, TokenBook
from deploy.join.words import JoinRequest
from deploy.local.rundir import ClusterRecord
from springtide.config import LOOPBACK, ClusterConfig
from springtide.credentials import Credentials
from springtide.errors import Unavailable
from springtide.membership import Member, Membership
from springtide.valkey import ValkeyClient, with_certificates
from tests.support.cluster import Cluster
from tests.support.joined import new_token

MACHINES, ALONE = 1000, 50
"""That come at once, and that came before them one after the other."""
AGAIN_S = 2.0
"""After which a machine that was not let in tries again, as systemd has it (docs/bare-machines.md)."""
LOOK_EVERY_S = 0.1
_ROLE: Final = "gateway"
"""Nobody dials one for being in the membership."""
NOTES = (
    f"Joining through the join service: `springtide up` without engines, and {MACHINES:,} machines at once, with one token; each has what "
    "`springtide node` does until it starts its processes: it fetches the authorities, is let in with a certificate of its own, "
    f"connects with the head's Valkey by mTLS and announces itself. Who is not let in tries again after {AGAIN_S:g} s. All machines are "
    "played by one process, which is kept to one of this machine's cores, so that the time until all are in may be theirs as much as the "
    "head's: hence the processor time of either. The head's is that of the process with the join service and the relay to Valkey."
)


@dataclass(frozen=True, slots=True)
class Arrived:
    """One machine that was let in."""

    membership: Membership
    asked_at: float
    """When its first question was asked, by the monotonic clock."""
    told_at: float
    """When it was told everything."""
    failed: int
    """Tries before."""


@dataclass(frozen=True, slots=True)
class AtOnce:
    told_s: float
    """From the first question of all until the last machine was told everything."""
    known_s: float
    """And until all are in the membership."""
    failed: int
    head_ms: float
    """Processor time for each machine."""
    player_ms: float


@dataclass(frozen=True, slots=True)
class Joins:
    alone_ms: Sequence[float]
    head_alone_ms: float
    """Processor time of the head for each of those."""
    signed_ms: Sequence[float]
    checked_ms: Sequence[float]
    at_once: AtOnce


class Machines:
    """Those that join one cluster. They stay in its membership until `leave`."""

    def __init__(self, record: ClusterRecord, token: str, scratch: Path) -> None:
        self._record = record
        self._token = Token.parse(token)
        self._scratch = scratch
        self._arrived: list[Arrived] = []

    async def join(self, name: str, key: bytes, request: bytes) -> Arrived:
        """Raises TimeoutError where it is not let in within START_S."""
        asked_at, failed, address = time.monotonic(), 0, self._record.join_address
        # Whose answer was lost asks for the same name by the same request, which is its own.
        asked = JoinRequest(token=str(self._token), role=_ROLE, name=name, request=request.decode())
        async with asyncio.timeout(START_S):
            while True:
                try:
                    reply = await client.join(address, await client.discover(address, self._token), asked)
                    break
                except Unavailable:
                    failed += 1
                    await asyncio.sleep(AGAIN_S)
        told_at = time.monotonic()
        own = Identity(self._scratch / name)
        own.install(key, reply.certificate.encode(), reply.authorities.encode())
        url = with_certificates(reply.redis_url, str(own.certificate), str(own.key), str(own.authorities))
        credentials = Credentials(reply.cluster_secret.encode(), self._record.cluster)
        membership = Membership(url, self._record.cluster, ClusterConfig().conductor.lease_s, credentials)
        arrived = Arrived(membership, asked_at, told_at, failed)
        self._arrived.append(arrived)
        await arrived.membership.announce(Member(_ROLE, name, 1, f"{LOOPBACK}:1"))
        return arrived

    async def leave(self) -> None:
        await asyncio.gather(*(each.membership.close() for each in self._arrived))


def measured(machines: int, alone: int) -> Joins:
    """A cluster is started for it."""
    with tempfile.TemporaryDirectory() as scratch, Cluster(prefill=0, decode=0, join_port=0, valkey_port=0) as cluster:
        token, _ = new_token(cluster, "1h")
        with on_cores({max(os.sched_getaffinity(0))}):
            return asyncio.run(_measured(cluster.record, cluster.supervisor, token, Path(scratch), machines, alone))


async def _measured(record: ClusterRecord, head: psutil.Process, token: str, scratch: Path, machines: int, alone: int) -> Joins:
    played = Machines(record, token, scratch)
    try:
        began = processor_s(head)
        arrived = [await played.join(f"alone-{index}", *new_request([LOOPBACK])) for index in range(alone)]
        alone_ms = [1000 * (each.told_at - each.asked_at) for each in arrived]
        head_alone_ms = 1000 * (processor_s(head) - began) / alone
        _, request = new_request([LOOPBACK])
        signed_ms = [_ms(lambda: _sign(record, request)) for _ in range(alone)]
        checked_ms = []
        async with ValkeyClient.from_url(record.redis_url) as valkey:
            book = TokenBook(valkey, record.cluster, record.credentials)
            for _ in range(alone):
                asked_at = time.perf_counter()
                await book.check(Token.parse(token), time.time())
                checked_ms.append(1000 * (time.perf_counter() - asked_at))
        at_once = await _at_once(played, record, head, machines, already=alone)
    finally:
        await played.leave()
    return Joins(alone_ms, head_alone_ms, signed_ms, checked_ms, at_once)


async def _at_once(played: Machines, record: ClusterRecord, head: psutil.Process, machines: int, already: int) -> AtOnce:
    """`already`: how many of `played` are in the membership."""
    own = [(f"machine-{index}", *new_request([LOOPBACK])) for index in range(machines)]
    membership, me = Membership(record.redis_url, record.cluster, ClusterConfig().conductor.lease_s, record.credentials), psutil.Process()
    try:
        used, began = (processor_s(head), processor_s(me)), time.monotonic()
        async with asyncio.TaskGroup() as group:
            known = group.create_task(_known(membership, machines + already))
            joining = [group.create_task(played.join(*each)) for each in own]
        head_s, player_s = (processor_s(process) - before for process, before in zip((head, me), used, strict=True))
    finally:
        await membership.close()
    arrived = [each.result() for each in joining]
    told_s = max(each.told_at for each in arrived) - began
    failed = sum(each.failed for each in arrived)
    return AtOnce(told_s, known.result() - began, failed, 1000 * head_s / machines, 1000 * player_s / machines)


async def _known(membership: Membership, count: int) -> float:
    """When so many machines were in the membership."""
    async with asyncio.timeout(START_S):
        while True:
            members = await membership.members() or []
            if sum(member.member_id.startswith(("alone-", "machine-")) for member in members) == count:
                return time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)


def _ms(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - began)


def _sign(record: ClusterRecord, request: bytes) -> bytes:
    """As the service does it, which reads its authority each time."""
    return Authority.open(Path(record.ca_dir)).issue("machine", request, machine=True)


def rows(runs: Sequence[Joins], machines: int) -> list[Row]:
    case = f"{machines:,} machines at once"
    return [
        plain("from a machine's first question to the join service until it is told everything", "ms", _medians(runs, "alone_ms"), "alone"),
        plain("processor time of the head for a machine that joins", "ms", [run.head_alone_ms for run in runs], "alone"),
        plain("signing a certificate, of that", "ms", _medians(runs, "signed_ms"), "alone"),
        plain("checking a token, of that", "ms", _medians(runs, "checked_ms"), "alone"),
        plain("until all were told everything", "s", [run.at_once.told_s for run in runs], case),
        plain("until all are in the membership", "s", [run.at_once.known_s for run in runs], case),
        plain("tries that failed and were made again", "", [run.at_once.failed for run in runs], case),
        plain("processor time of the head for a machine that joins", "ms", [run.at_once.head_ms for run in runs], case),
        plain("processor time of who plays a machine", "ms", [run.at_once.player_ms for run in runs], case),
    ]


def _medians(runs: Sequence[Joins], name: str) -> list[float]:
    return [statistics.median(getattr(run, name)) for run in runs]


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=MACHINES)
    parser.add_argument("--alone", type=int, default=ALONE)
    given = parser.parse_args(arguments)
    show("Joins", rows([measured(given.machines, given.alone)], given.machines))


if __name__ == "__main__":
    main(sys.argv[1:])
