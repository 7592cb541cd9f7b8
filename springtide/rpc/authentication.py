"""Call credentials: a token in each call's metadata, put there by the channel and looked at by the server before it reads a message.

Once there is mTLS, these two classes are what it takes the place of.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any

import grpc
import grpc.aio

from springtide.credentials import Credentials
from springtide.telemetry import FewWarnings

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
