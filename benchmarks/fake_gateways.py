"""The gateways whose attempts live, as Conductors hear of them: every two seconds each tells each Conductor of all of its own.

`python -m benchmarks.fake_gateways REDIS_URL CLUSTER WORKERS LIVE`. Ends when its input does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import Sequence

import uvloop

from benchmarks.fake_nodes import SECRET, give_way
from benchmarks.live_cluster import LiveCluster
from gateway.conductor_link import CALL_TIMEOUT_S, RENEW_EVERY_S
from gateway.questions import Questions, Unanswered
from springtide.credentials import Credentials
from springtide.membership import Membership
from springtide.protocol import wire
from springtide.rpc import conductor_pb2
from springtide.rpc.channels import connect

MEMBER_LEASE_S = 5.0


async def renew(address: str, credentials: Credentials, messages: Sequence[conductor_pb2.RenewRequest]) -> None:
    """Has each gateway renew in its turn, all of them within RENEW_EVERY_S, for ever; whether the Conductor is there or not."""
    now = asyncio.get_running_loop().time
    async with connect(address, credentials) as channel:
        conductor, began = Questions(channel, credentials), now()
        for number, message in enumerate(itertools.cycle(messages)):
            await asyncio.sleep(began + number * RENEW_EVERY_S / len(messages) - now())
            with contextlib.suppress(Unanswered):
                await conductor.renew(message, CALL_TIMEOUT_S)
            if conductor.failed:
                conductor = Questions(channel, credentials)


async def renew_everywhere(redis_url: str, cluster: str, live: LiveCluster) -> None:
    """At each Conductor, from when it is announced until it is no more."""
    credentials = Credentials(SECRET.encode(), cluster)
    messages = [wire.RENEW.encode(renewal) for renewal in live.renewals()]
    membership, renewing = Membership(redis_url, cluster, MEMBER_LEASE_S, credentials), dict[str, asyncio.Task[None]]()
    while True:
        members = await membership.members()
        addresses = {member.address for member in members or () if member.role == "conductor"} or set(renewing)
        for address in renewing.keys() - addresses:
            renewing.pop(address).cancel()
        for address in addresses - renewing.keys():
            renewing[address] = asyncio.create_task(renew(address, credentials, messages))
        for task in renewing.values():
            if task.done():
                await task
        await asyncio.sleep(RENEW_EVERY_S)


async def main(redis_url: str, cluster: str, live: LiveCluster) -> None:
    renewing = asyncio.create_task(renew_everywhere(redis_url, cluster, live))
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({renewing, ended}, return_when=asyncio.FIRST_COMPLETED)
    if renewing.done():
        await renewing
    renewing.cancel()


if __name__ == "__main__":
    give_way()
    uvloop.run(main(sys.argv[1], sys.argv[2], LiveCluster(int(sys.argv[3]), int(sys.argv[4]))))
