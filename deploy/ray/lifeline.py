"""How a node knows whether it is still wanted, whatever has become of Ray: by what the placer says in the cluster's Valkey."""

from __future__ import annotations

import asyncio
import logging
import time

from deploy.ray.orders import NodeOrder
from deploy.ray.record import PlacementBook, PlacementRecord
from springtide.config import ClusterConfig
from springtide.credentials import credentials_of
from springtide.errors import Unavailable
from springtide.membership import Membership
from springtide.valkey import ValkeyClient

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5


class Lifeline:
    """What one node knows of it. Pure."""

    def __init__(self, name: str, placement: str, orphan_s: float, now: float) -> None:
        self._name = name
        self._placement = placement
        self._orphan_s = orphan_s
        self._beat: tuple[int, int] | None = None
        self._seen_at = now

    def look(self, record: PlacementRecord | None, now: float) -> str | None:
        """Why the node is to leave; None while it is to go on. `record`: what the placer says; None: it cannot be read, or is not there."""
        if record is not None:
            if not record.wants(self._name, self._placement):
                return "it is wanted no more"
            if (record.placer_pid, record.beat) != self._beat:
                self._beat, self._seen_at = (record.placer_pid, record.beat), now
        if now - self._seen_at >= self._orphan_s:
            return f"there has been no sign of `springtide up` for {self._orphan_s:g} s"
        return None


async def follow(order: NodeOrder, config: ClusterConfig) -> None:
    """Returns once the node, which has joined, is to leave."""
    assert config.redis_url is not None, "the configuration must be resolved"
    lifeline = Lifeline(order.name, order.placement, order.orphan_s, time.monotonic())
    async with ValkeyClient.from_url(config.redis_url, socket_timeout=2.0, socket_connect_timeout=2.0) as client:
        book = PlacementBook(client, config.cluster, credentials_of(config))
        while True:
            record = None
            try:
                record = await book.read()
            except Unavailable as error:
                logger.debug("%s", error)
            reason = lifeline.look(record, time.monotonic())
            if reason is not None:
                print(f"{order.name} leaves: {reason}", flush=True)
                if order.stage and (record is None or record.has(order.name, order.placement)):
                    await _first_stage_has_ended(order.name, config)
                return
            await asyncio.sleep(LOOK_EVERY_S)


async def _first_stage_has_ended(group: str, config: ClusterConfig) -> None:
    """Returns once the first stage's node, whose store goes last, has ended what the group has, which takes all stages, or had its time."""
    until = time.monotonic() + config.drain_s
    membership = Membership.of(config, credentials_of(config))
    try:
        while time.monotonic() < until and await membership.has("store", group) is not False:  # noqa: ASYNC110 - another machine ends it
            await asyncio.sleep(LOOK_EVERY_S)
    finally:
        await membership.close()
