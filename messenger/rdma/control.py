"""The control RPC of the transport, both ends: how queue pairs are exchanged, and how a side makes sure that the other has let go."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
import time
from typing import Any, Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from messenger.base import Identity, WrongSecret
from messenger.options import RdmaOptions
from messenger.rdma.ports import PortAddress
from messenger.rdma.proofs import NONCE_BYTES, Nonces, proof_of
from messenger.rdma.wire import (
    VERSION,
    AnsweredOffer,
    OfferedPath,
    answer_from_pb,
    answer_to_pb,
    offer_to_pb,
    pair_from_pb,
    port_from_pb,
    port_to_pb,
)
from springtide.errors import PeerLost, SpringtideError
from springtide.rpc import channels
from springtide.rpc import rdma_pb2 as pb
from springtide.rpc.rdma_pb2_grpc import RdmaControlServicer, RdmaControlStub, add_RdmaControlServicer_to_server

Context = grpc.aio.ServicerContext[Any, Any]

_LEAVE_TIMEOUT_S = 1.0
"""A peer has so long to say that nothing can land any more."""
_ASK_TIMEOUT_S = 1.0


class Lender(Protocol):
    """What the server end asks of the process that lends memory."""

    def ports(self) -> list[PortAddress]: ...

    def open(self, caller: Identity, paths: list[OfferedPath], session: bytes) -> AnsweredOffer:
        """Connects `paths` and adds them to `session`, empty for a new one. Raises SpringtideError."""
        ...

    def leave(self, session: bytes, path: int | None) -> None:
        """Closes one path of a session, or all; what is unknown is closed already."""
        ...


class ControlServer:
    def __init__(self, lender: Lender, incarnation: int, options: RdmaOptions) -> None:
        self._credentials = options.credentials
        self._server = channels.new_server(self._credentials)
        servicer = _Servicer(lender, incarnation, options.secret)
        add_RdmaControlServicer_to_server(servicer, self._server)

    async def start(self, address: str) -> str:
        """Serves at `host:port`, port 0 for a free one. Returns the address. Raises OSError when it is taken."""
        try:
            served = channels.listen(self._server, address, self._credentials)
        except RuntimeError as error:
            raise OSError(f"cannot serve the control RPC of rdma at {address}: {error}") from error
        await self._server.start()
        return served

    async def close(self) -> None:
        await self._server.stop(None)


class ControlClient:
    """The caller's end, to one peer. Every method raises PeerLost when that is away or does not answer as it should."""

    def __init__(self, address: str, options: RdmaOptions) -> None:
        self._address = address
        self._secret = options.secret
        self._channel = channels.connect(address, options.credentials)
        self._stub = RdmaControlStub(self._channel)
        self._nonces = (b"", b"")
        self._closed = False

    async def greet(self, expected_incarnation: int, timeout_s: float) -> list[PortAddress]:
        """The peer's ports. It has half of the time: gRPC gives up what is not connected within 0.2 s, and until then it is tried again.
        Raises PeerLost when it is another incarnation."""
        nonce = secrets.token_bytes(NONCE_BYTES)
        welcome: pb.RdmaWelcome = await self._call(
            self._stub.Greet, pb.RdmaGreeting(caller_nonce=nonce), timeout_s / 2, wait_for_ready=True
        )
        if welcome.incarnation != expected_incarnation:
            raise PeerLost(f"the peer has restarted: it is incarnation {welcome.incarnation}, not {expected_incarnation}")
        self._nonces = (nonce, welcome.server_nonce)
        try:
            return [port_from_pb(port) for port in welcome.ports]
        except ValueError as error:
            raise PeerLost(f"{self._address} names a port that is not understood: {error}") from error

    async def connect(
        self, expected_incarnation: int, caller: Identity, paths: list[OfferedPath], session: bytes, timeout_s: float
    ) -> AnsweredOffer:
        """Offers paths, after `greet`, to be added to `session`, empty for a new one. Raises WrongSecret, PeerLost."""
        offer = offer_to_pb(expected_incarnation, caller, paths, session).SerializeToString()
        proof = proof_of(self._secret, "offer", *self._nonces, offer)
        signed = pb.SignedRdmaOffer(caller_nonce=self._nonces[0], server_nonce=self._nonces[1], offer=offer, proof=proof)
        reply: pb.SignedRdmaAnswer = await self._call(self._stub.Connect, signed, timeout_s)
        if not hmac.compare_digest(reply.proof, proof_of(self._secret, "answer", *self._nonces, reply.answer)):
            raise WrongSecret(f"{self._address} does not know the cluster_secret")
        try:
            answer = answer_from_pb(pb.RdmaAnswer.FromString(reply.answer))
        except (ValueError, DecodeError) as error:
            raise PeerLost(f"{self._address} answers what is not understood: {error}") from error
        if len(answer.paths) != len(paths):
            raise PeerLost(f"{self._address} answers {len(answer.paths)} paths instead of {len(paths)}")
        return answer

    async def ask(self) -> None:
        """Asks whether the peer's process answers at all."""
        await self._call(self._stub.Greet, pb.RdmaGreeting(), _ASK_TIMEOUT_S)

    async def leave(self, session: bytes, path: int) -> None:
        """Has the peer close one path of a session: after it returns, nothing that was sent over it can land."""
        message = pb.LeaveRdmaPath(session=pb.RdmaSession(token=session), path=path)
        await self._call(self._stub.LeavePath, message, _LEAVE_TIMEOUT_S)

    async def disconnect(self, session: bytes) -> None:
        """Does for all paths of a session what `leave` does for one."""
        await self._call(self._stub.Disconnect, pb.RdmaSession(token=session), _LEAVE_TIMEOUT_S)

    async def close(self) -> None:
        """Ends the channel; calls in flight raise PeerLost. Idempotent."""
        self._closed = True
        await self._channel.close(None)

    async def _call(self, method: Any, message: Any, timeout_s: float, wait_for_ready: bool = False) -> Any:
        closed = PeerLost(f"the connection to {self._address} was closed here")
        if self._closed:
            raise closed
        try:
            return await method(message, timeout=timeout_s, wait_for_ready=wait_for_ready)
        except asyncio.CancelledError as error:
            if self._closed:  # gRPC lets the closing of a channel look as if the caller had been cancelled
                raise closed from error
            raise
        except grpc.aio.AioRpcError as error:
            kind = WrongSecret if error.code() is grpc.StatusCode.PERMISSION_DENIED else PeerLost
            raise kind(f"{self._address}: {error.details()} ({error.code().name})") from error


class _Servicer(RdmaControlServicer):
    def __init__(self, lender: Lender, incarnation: int, secret: bytes | None) -> None:
        self._lender = lender
        self._incarnation = incarnation
        self._secret = secret
        self._nonces = Nonces()

    async def Greet(self, request: pb.RdmaGreeting, context: Context) -> pb.RdmaWelcome:
        ports = [port_to_pb(port) for port in self._lender.ports()]
        return pb.RdmaWelcome(server_nonce=self._nonces.make(time.monotonic()), incarnation=self._incarnation, ports=ports)

    async def Connect(self, request: pb.SignedRdmaOffer, context: Context) -> pb.SignedRdmaAnswer:
        nonces = (request.caller_nonce, request.server_nonce)
        proven = hmac.compare_digest(request.proof, proof_of(self._secret, "offer", *nonces, request.offer))
        if not proven or not self._nonces.use(request.server_nonce, time.monotonic()):
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "the caller does not know the cluster_secret")
        try:
            answer = self._open(pb.RdmaOffer.FromString(request.offer))
        except (SpringtideError, ValueError, DecodeError) as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        message = answer_to_pb(answer).SerializeToString()
        return pb.SignedRdmaAnswer(answer=message, proof=proof_of(self._secret, "answer", *nonces, message))

    async def LeavePath(self, request: pb.LeaveRdmaPath, context: Context) -> pb.RdmaDone:
        self._lender.leave(request.session.token, request.path)
        return pb.RdmaDone()

    async def Disconnect(self, request: pb.RdmaSession, context: Context) -> pb.RdmaDone:
        self._lender.leave(request.token, None)
        return pb.RdmaDone()

    def _open(self, offer: pb.RdmaOffer) -> AnsweredOffer:
        if offer.version != VERSION:
            raise ValueError(f"version {offer.version} of the rdma transport, this is {VERSION}")
        if offer.expected_incarnation != self._incarnation:
            raise ValueError(f"the peer has restarted: it is incarnation {self._incarnation}, not {offer.expected_incarnation}")
        paths = [OfferedPath(pair_from_pb(path.queue_pair), path.port) for path in offer.paths]
        return self._lender.open(Identity(offer.caller_name, offer.caller_incarnation), paths, offer.session.token)


async def close_quietly(client: ControlClient, session: bytes) -> None:
    """Tells a peer that may be gone that a session is over, and ends the channel."""
    with contextlib.suppress(PeerLost):
        await client.disconnect(session)
    await client.close()
