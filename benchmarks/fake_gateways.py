"""The gateways whose attempts live, as the Conductor hears of them: every two seconds each tells of all of its own.

`python -m benchmarks.fake_gateways ADDRESS WORKERS LIVE`: ADDRESS is the Conductor's. Ends when its input does.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys

import uvloop

from benchmarks.fake_nodes import LESS_URGENT, SECRET
from benchmarks.live_cluster import LiveCluster
from gateway.conductor_link import RENEW_EVERY_S
from springtide.credentials import Credentials
from springtide.protocol import wire
from springtide.rpc.channels import connect
from springtide.rpc.conductor_pb2_grpc import ConductorStub


async def renew(address: str, cluster: str, live: LiveCluster) -> None:
    """Has each gateway renew in its turn, all of them within RENEW_EVERY_S, for ever."""
    messages = [wire.RENEW.encode(renewal) for renewal in live.renewals()]
    now = asyncio.get_running_loop().time
    async with connect(address, Credentials(SECRET.encode(), cluster)) as channel:
        conductor, began = ConductorStub(channel), now()
        for number, message in enumerate(itertools.cycle(messages)):
            await asyncio.sleep(began + number * RENEW_EVERY_S / len(messages) - now())
            await conductor.Renew(message)


async def main(address: str, cluster: str, live: LiveCluster) -> None:
    renewing = asyncio.create_task(renew(address, cluster, live))
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    await asyncio.wait({renewing, ended}, return_when=asyncio.FIRST_COMPLETED)
    if renewing.done():
        await renewing
    renewing.cancel()


if __name__ == "__main__":
    os.nice(LESS_URGENT)
    uvloop.run(main(sys.argv[1], sys.argv[2], LiveCluster(int(sys.argv[3]), int(sys.argv[4]))))
