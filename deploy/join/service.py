"""The join service: lets machines in that show a token, gives them what they need to know, and renews their certificates."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect

from deploy.ca.authority import Authority, addresses_asked_for, addresses_in, is_machines, name_of
from deploy.join.settings import shared_settings
from deploy.join.tokens import Token, TokenBook
from deploy.join.words import MAX_BODY_BYTES, JoinReply, JoinRequest, RenewReply, RenewRequest
from gateway.http_server import HttpServer
from springtide.config import ClusterConfig, host_of, is_loopback
from springtide.errors import ConfigError, InvalidRequest, SpringtideError, Unauthenticated, Unavailable
from springtide.membership import Membership
from springtide.modelinfo import ModelInfo
from springtide.telemetry import FewWarnings
from springtide.tls import Tls

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 256
BODY_S = 10.0
"""A request's body comes within that."""
PROMISE_S = 10.0
"""For so long a name is kept for a machine that was let in: by then its store is in the membership."""
_Word = TypeVar("_Word", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Head:
    """What the service knows of its cluster."""

    told: JoinReply
    """What a machine is told that is let in, but for its certificates."""
    authority_directory: Path | None
    """Where the authority is that signs; None where certificates are given by somebody else."""
    tls: Tls
    """Of this machine."""
    copied: bool = False
    """The authority there is a copy, which somebody is to make again when the cluster believes others."""


def what_is_told(config: ClusterConfig, info: ModelInfo, redis_url: str, certified_valkey: bool) -> JoinReply:
    """At the head. `redis_url`: where machines elsewhere find Valkey."""
    secret = config.cluster_secret
    return JoinReply(
        certificate="",
        authorities="",
        cluster_secret="" if secret is None else secret.get_secret_value(),
        settings=shared_settings(config),
        model_info=asdict(info),
        redis_url=redis_url,
        certified_valkey=certified_valkey,
    )


class JoinService:
    def __init__(self, head: Head, tokens: TokenBook, membership: Membership) -> None:
        self._head = head
        self._tokens = tokens
        self._membership = membership
        self._warnings = FewWarnings(logger)
        self._promised: dict[tuple[str, str], tuple[str, float]] = {}
        """Names that were given away: to whose certificate request, and until when. Machines that come at the same moment and have the same
        name are not in the membership yet."""

    async def serve(self, listening: socket.socket) -> None:
        """Serves there until it is cancelled."""
        # Who joins has no certificate yet.
        tls = Tls(replace(self._head.tls.files, authorities=None))
        await HttpServer(self.app(), MAX_CONNECTIONS, tls).serve(sockets=[listening])

    def app(self) -> FastAPI:
        app = FastAPI(title="Springtide: joining a cluster", openapi_url=None)

        @app.get("/ca")
        async def authorities() -> Response:
            """Whoever asks has no reason yet to believe the answer, and compares it with the token's fingerprint."""
            try:
                return Response(self._bundle(), media_type="application/x-pem-file")
            except SpringtideError as error:
                return _refusal(error)

        @app.post("/join")
        async def join(request: Request) -> Response:
            return await self._answer(request, JoinRequest, self.join)

        @app.post("/renew")
        async def renew(request: Request) -> Response:
            return await self._answer(request, RenewRequest, self.renew)

        return app

    async def join(self, asked: JoinRequest, caller: str) -> JoinReply:
        """`caller`: the address from which it is asked. Raises Unauthenticated, InvalidRequest, Unavailable."""
        head = self._head
        before = None if asked.token else self._known(asked.certificate, asked.request, asked.signature)
        if before is None:
            try:
                token = Token.parse(asked.token)
            except ConfigError as error:
                raise Unauthenticated(error.message, code="no_token") from None
            await self._tokens.check(token, time.time())
        if head.authority_directory is not None:
            self._check_addresses(asked.request, caller)
        await self._check_name(asked, before)
        certificates = {"certificate": self._sign(asked.name, asked.request), "authorities": self._authorities()}
        reply = head.told.model_copy(update=certificates)
        by = f"the token {token.token_id}" if before is None else "its certificate from before"
        logger.info("%s node %s has joined with %s", asked.role, asked.name, by)
        return reply

    async def renew(self, asked: RenewRequest, caller: str) -> RenewReply:
        """Raises Unauthenticated, InvalidRequest."""
        own = self._known(asked.certificate, asked.request, asked.signature)
        further = addresses_asked_for(asked.request.encode()) - addresses_in(own)
        if further:
            raise InvalidRequest(f"a certificate is renewed for the addresses that it has, not for {_listed(further)}", param="request")
        return RenewReply(certificate=self._sign(name_of(own), asked.request), authorities=self._authorities())

    def _known(self, certificate: str, request: str, signature: str) -> x509.Certificate:
        """The certificate, where one of this cluster's authorities has signed it for a machine that was let in, and the request is of who
        has its key. Raises Unauthenticated."""
        authority = self._authority()
        own = None if authority is None else authority.vouches_for(certificate.encode())
        key = None if own is None else own.public_key()
        if own is None or not is_machines(own) or not isinstance(key, ec.EllipticCurvePublicKey):
            raise Unauthenticated(
                "the certificate is not one of a machine that this cluster's authority believes, or not now", code="unknown_certificate"
            )
        try:
            key.verify(bytes.fromhex(signature), request.encode(), ec.ECDSA(hashes.SHA256()))
        except (InvalidSignature, ValueError):
            raise Unauthenticated("the request is not signed with the key of the certificate", code="unknown_certificate") from None
        return own

    def _check_addresses(self, request: str, caller: str) -> None:
        """Raises InvalidRequest for a head's names: whoever joins or renews believes who has them, and tells him its token. A node on a
        head's machine has its address."""
        heads = self._heads_names()
        if caller in heads:
            return
        wrong = {each for each in addresses_asked_for(request.encode()) if "*" in each or each.lower().rstrip(".") in heads}
        if wrong:
            raise InvalidRequest(f"--address: {_listed(wrong)} is a head's own, and not of the machine at {caller}", param="request")

    def _heads_names(self) -> frozenset[str]:
        """What this machine's certificate calls it, and what others are called where machines join, without what every machine calls
        itself."""
        own = x509.load_pem_x509_certificates(self._head.tls.files.certificate.read_bytes())[0]
        names = (*addresses_in(own), *self._head.told.settings["join_hosts"])
        return frozenset(each.lower().rstrip(".") for each in names if not is_loopback(each))

    async def _check_name(self, asked: JoinRequest, before: x509.Certificate | None) -> None:
        """Raises InvalidRequest where it is another machine's. Who had it `before` need not wait until its own record is over: who has it,
        at an address that it still has. Another may have its certificate on a disk that was copied."""
        kinds = {"prefill": ("store", "layer-store"), "decode": ("store",), "instance": ("store",)}.get(asked.role, (asked.role,))
        asks_for = own = frozenset[str]()
        if before is not None and name_of(before) == asked.name:
            asks_for = addresses_asked_for(asked.request.encode())
            own = asks_for & addresses_in(before)
        members = await self._membership.members() or ()
        taken = any(each.role in kinds and each.member_id == asked.name and host_of(each.address) not in own for each in members)
        now = time.monotonic()
        self._promised = {name: promise for name, promise in self._promised.items() if promise[1] > now}
        promised, _ = self._promised.get((kinds[0], asked.name), (asked.request, now))
        anothers = promised != asked.request and not (own and addresses_asked_for(promised.encode()) == asks_for)
        if taken or anothers:
            raise InvalidRequest(f"--name: the cluster has a {asked.role} node {asked.name!r} already", param="name", code="name_taken")
        self._promised[kinds[0], asked.name] = (asked.request, now + PROMISE_S)

    async def _answer(self, request: Request, word: type[_Word], answer: Callable[[_Word, str], Awaitable[BaseModel]]) -> Response:
        try:
            body = await _body(request)
            try:
                asked = word.model_validate_json(body)
            except ValidationError as error:
                problems = (f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors(include_input=False))
                raise InvalidRequest("; ".join(problems)) from None
            return JSONResponse((await answer(asked, "" if request.client is None else request.client.host)).model_dump())
        except SpringtideError as error:
            if isinstance(error, Unauthenticated):
                self._warnings.warn("refused %.100s at %s: %s", request.url.path, request.client and request.client.host, error.message)
            return _refusal(error)

    def _authority(self) -> Authority | None:
        """Raises Unavailable where it is a copy of what was before."""
        head = self._head
        if head.authority_directory is None:
            return None
        authority = Authority.open(head.authority_directory)
        if head.copied:
            check_copy(authority, self._believed())
        return authority

    def _believed(self) -> bytes:
        authorities = self._head.tls.files.authorities
        assert authorities is not None, "a cluster that can be joined has authorities"
        return authorities.read_bytes()

    def _bundle(self) -> bytes:
        authority = self._authority()
        return self._believed() if authority is None else authority.bundle

    def _authorities(self) -> str:
        """The same as text: comments in a file of others may be in any encoding."""
        return self._bundle().decode("ascii", "ignore")

    def _sign(self, name: str, request: str) -> str:
        authority = self._authority()
        return "" if authority is None else authority.issue(name, request.encode(), machine=True).decode()


def _refusal(error: SpringtideError) -> Response:
    return JSONResponse({"message": error.message, "code": error.code}, status_code=error.http_status)


def check_copy(authority: Authority, believed: bytes) -> None:
    """Raises Unavailable where the cluster believes other authorities than when the copy was made."""
    if authority.bundle != believed:
        raise Unavailable(f"tls.ca_dir: {authority.directory} is not what the head's `ca` is now: copy it again")


async def _body(request: Request) -> bytes:
    """Raises InvalidRequest for more than anybody has to say, or what does not come; Unavailable where nobody is there to be answered."""
    body = b""
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    raise InvalidRequest(f"a request may have {MAX_BODY_BYTES} bytes")
    except TimeoutError:
        raise InvalidRequest(f"a request's body is to be here within {BODY_S:g} s") from None
    except ClientDisconnect:
        raise Unavailable("who asked is gone") from None
    return body


def _listed(addresses: Iterable[str]) -> str:
    return ", ".join(sorted(addresses))
