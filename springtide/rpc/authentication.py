"""Call credentials: a token in each call's metadata, put there by the channel and looked at by the server before it reads a message. And a
channel that outlives its certificate."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from springtide.credentials import Credentials
from springtide.telemetry import FewWarnings
from springtide.tls import Tls

logger = logging.getLogger(__name__)

TOKEN_KEY = "springtide-cluster-token"
_PUBLIC_PREFIX = "/grpc.health.v1.Health/"
REFUSAL = "this port is for processes of its own cluster, and the call does not carry that cluster's credentials (cluster_secret)"


class OnlyOfTheCluster(grpc.aio.ServerInterceptor):
    """Refuses every call without the cluster's token as UNAUTHENTICATED, health checks excepted. Nothing of a refused call is read."""

    def __init__(self, credentials: Credentials) -> None:
        self._credentials = credentials
        self._warnings = FewWarnings(logger)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        method, metadata = handler_call_details.method, handler_call_details.invocation_metadata
        if method.startswith(_PUBLIC_PREFIX) or any(key == TOKEN_KEY and self._credentials.admits(value) for key, value in metadata):
            return await continuation(handler_call_details)
        # Of this kind whatever the method is: only it is called before a message has come.
        return grpc.stream_stream_rpc_method_handler(functools.partial(self._refuse, method))

    async def _refuse(self, method: str, requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._warnings.warn("refused a call of %.100s by a stranger at %s", method, context.peer())
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, REFUSAL)


class CredentialedChannel(grpc.aio.Channel):
    """A channel whose calls carry the token. It wraps the calls instead of intercepting them, which would cost each of them a task."""

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._metadata = ((TOKEN_KEY, token),)

    async def __aenter__(self) -> CredentialedChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._channel.__aexit__(kind, error, trace)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return functools.partial(self._channel.unary_unary(*arguments, **named), metadata=self._metadata)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return functools.partial(self._channel.unary_stream(*arguments, **named), metadata=self._metadata)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return functools.partial(self._channel.stream_unary(*arguments, **named), metadata=self._metadata)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return functools.partial(self._channel.stream_stream(*arguments, **named), metadata=self._metadata)


class RenewedChannel(grpc.aio.Channel):
    """A channel with mTLS whose calls are made with the newest certificate. A channel of gRPC's shows the one that it was made with for
    good: once there is a newer one, further calls have a new channel, those under way go on where they are, and the channel that none is on
    any more is closed."""

    def __init__(self, open_channel: Callable[[grpc.ChannelCredentials], grpc.aio.Channel], tls: Tls) -> None:
        self._open_channel = open_channel
        self._tls = tls
        self._number = tls.number
        self._channels = [open_channel(tls.channel_credentials())]
        """The last is the newest."""
        self._under_way = Counter[grpc.aio.Channel]()
        self._closing = set[asyncio.Task[None]]()

    async def __aenter__(self) -> RenewedChannel:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await asyncio.gather(*(channel.close(grace) for channel in self._channels))

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._newest().get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._newest().wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._newest().channel_ready()

    def unary_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._deferred("unary_unary", arguments, named)

    def unary_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._deferred("unary_stream", arguments, named)

    def stream_unary(self, *arguments: Any, **named: Any) -> Any:
        return self._deferred("stream_unary", arguments, named)

    def stream_stream(self, *arguments: Any, **named: Any) -> Any:
        return self._deferred("stream_stream", arguments, named)

    def _newest(self) -> grpc.aio.Channel:
        if self._tls.number != self._number:
            self._number = self._tls.number
            before = self._channels[-1]
            self._channels.append(self._open_channel(self._tls.channel_credentials()))
            self._close_if_idle(before)
        return self._channels[-1]

    def _close_if_idle(self, older: grpc.aio.Channel) -> None:
        if not self._under_way[older]:
            self._channels.remove(older)
            del self._under_way[older]
            task = asyncio.create_task(older.close(None))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _ended(self, channel: grpc.aio.Channel) -> None:
        self._under_way[channel] -= 1
        if channel is not self._channels[-1]:
            self._close_if_idle(channel)

    def _deferred(self, kind: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Callable[..., Any]:
        """What makes a method's calls over the channel that is the newest then."""
        channel = self._newest()
        method = getattr(channel, kind)(*arguments, **named)

        def call(*message: Any, **options: Any) -> Any:
            nonlocal channel, method
            newest = self._newest()
            if newest is not channel:
                channel, method = newest, getattr(newest, kind)(*arguments, **named)
            begun = method(*message, **options)
            self._under_way[newest] += 1
            begun.add_done_callback(lambda _: self._ended(newest))
            return begun

        return call
