"""The further stages of a group that is spread over several nodes: whoever runs these nodes starts them, here they are found and told."""

from __future__ import annotations

import grpc.aio

from prefill_node.server.stages import Stage
from springtide.credentials import credentials_of
from springtide.errors import ConfigError, PeerLost
from springtide.membership import Membership
from springtide.process import ProcessArguments
from springtide.protocol.stages import LoadLayers
from springtide.protocol.wire import LOAD_LAYERS
from springtide.rpc import channels, stage_pb2_grpc
from springtide.supervision import persevere

LOOK_EVERY_S = 0.5


class RemoteStage(Stage):
    """A stage on a node of its own."""

    def __init__(self, arguments: ProcessArguments, number: int) -> None:
        """Raises ConfigError where the cluster has no membership to find it in."""
        super().__init__(arguments, number)
        config = arguments.config
        if config.redis_url is None:
            raise ConfigError("redis_url: the stages of a group over several nodes are found there, and there is none")
        self._stages = config.prefill_node.stages
        self._credentials = credentials_of(config)
        self._membership = Membership.of(config, self._credentials)
        self._address = ""
        self._channel: grpc.aio.Channel | None = None

    @property
    def stub(self) -> stage_pb2_grpc.PrefillStageStub:
        assert self._channel is not None, "it has its layers first"
        return stage_pb2_grpc.PrefillStageStub(self._channel)

    async def start(self) -> None:
        """Has nothing to begin: the stage's own node does."""

    async def have(self, layers: range) -> None:
        """Waits for it as long as it takes: the group is nothing without it."""
        await persevere(lambda: self._load(layers), f"stage {self.number}", LOOK_EVERY_S, PeerLost)

    async def kill(self) -> None:
        """Ends its session, for lack of an answer; a stage that does not come to rest then ends its process by itself. Until then its
        node's store says that it has the arena, and the slots stay nobody's."""
        await self._hang_up()

    async def close(self) -> None:
        await self._hang_up()
        await self._membership.close()

    async def _load(self, layers: range) -> None:
        """Raises PeerLost when there is none that has, or takes, these layers."""
        members = await self._membership.members()
        address = next((one.address for one in members or () if (one.role, one.member_id) == ("stage", self.stage_id)), None)
        if address is None:
            raise PeerLost(f"{self.stage_id} is not there yet")
        if self._channel is None or address != self._address:
            await self._hang_up()
            self._address, self._channel = address, channels.connect(address, self._credentials)
        try:
            await self.stub.Load(LOAD_LAYERS.encode(LoadLayers(layers.start, layers.stop, self._stages)))
        except grpc.aio.AioRpcError as error:
            raise PeerLost(f"{self.stage_id} at {address}: {error.details()}") from error

    async def _hang_up(self) -> None:
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close(None)
