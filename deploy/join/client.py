"""The client of the join service: how a machine finds out whom to believe, is let in, and stays."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from deploy.ca.authority import authority_in
from deploy.join.tokens import Token
from deploy.join.words import JoinReply, JoinRequest, RenewReply, RenewRequest
from springtide.errors import InvalidRequest, SpringtideError, Unauthenticated, Unavailable
from springtide.tls import client_context

TIMEOUT_S = 10.0
"""For each step."""
ANSWER_S = 60.0
MAX_ANSWER_BYTES = 4 << 20
_Reply = TypeVar("_Reply", bound=BaseModel)
_Answer = TypeVar("_Answer")


async def first_that_answers(services: Sequence[str], ask: Callable[[str], Awaitable[_Answer]]) -> _Answer:
    """What the first of the join services (each `host:port`) says that is available. Raises Unavailable where none is; and whatever else
    the one raises that is."""
    failed = list[str]()
    for address in services:
        try:
            return await ask(address)
        except Unavailable as error:
            failed.append(error.message)
    raise Unavailable("; ".join(failed))


async def discover(address: str, token: Token) -> bytes:
    """PEM: the authority that the token speaks of, as the head at `host:port` shows it. Nothing is told to the head. Raises Unavailable;
    Unauthenticated where that has another authority, and is another cluster's, or somebody who would like to be taken for it."""
    nobody_is_believed = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    nobody_is_believed.check_hostname, nobody_is_believed.verify_mode = False, ssl.CERT_NONE
    found = authority_in(await _bundle(address, nobody_is_believed), token.fingerprint)
    if found is None:
        raise Unauthenticated(
            f"--token: {address} is not of the cluster that the token was made for: it has no authority sha256:{token.fingerprint}"
        )
    return found


async def join(address: str, authorities: bytes, asked: JoinRequest) -> JoinReply:
    """Raises Unavailable, Unauthenticated, InvalidRequest."""
    return await _ask(address, "/join", authorities, asked, JoinReply)


async def renew(address: str, authorities: bytes, asked: RenewRequest) -> RenewReply:
    """Raises Unavailable, Unauthenticated, InvalidRequest."""
    return await _ask(address, "/renew", authorities, asked, RenewReply)


async def believed(address: str, authorities: bytes) -> bytes:
    """PEM: whom the cluster believes now. Raises Unavailable."""
    return await _bundle(address, client_context(authorities))


async def _bundle(address: str, context: ssl.SSLContext) -> bytes:
    status, said = await _answer(address, context, "GET", "/ca")
    if status != httpx.codes.OK:
        raise Unavailable(f"--join: {address} is no join service of a cluster: it answers /ca with {status}")
    return said


async def _ask(address: str, path: str, authorities: bytes, asked: BaseModel, reply: type[_Reply]) -> _Reply:
    status, said = await _answer(address, client_context(authorities), "POST", path, asked.model_dump_json())
    try:
        if status == httpx.codes.OK:
            return reply.model_validate_json(said)
        refusal = json.loads(said)
        message, code = str(refusal["message"]), refusal.get("code")
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"--join: {address} answers what is not understood: {error}") from None
    kinds: dict[int, type[SpringtideError]] = {401: Unauthenticated, 400: InvalidRequest}
    raise kinds.get(status, Unavailable)(f"{address}: {message}", code=code)


async def _answer(address: str, context: ssl.SSLContext, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
    """The status, and what is said. Raises Unavailable, also for what is longer than anything that a head has to say, or does not end."""
    said = b""
    headers = {"accept-encoding": "identity"}
    try:
        async with (
            asyncio.timeout(ANSWER_S),
            httpx.AsyncClient(verify=context, timeout=TIMEOUT_S, trust_env=False, headers=headers) as http,
            http.stream(method, f"https://{address}{path}", content=body) as answer,
        ):
            async for piece in answer.aiter_raw():
                said += piece
                if len(said) > MAX_ANSWER_BYTES:
                    raise Unavailable(f"--join: {address} is no head of a cluster: its answer has more than {MAX_ANSWER_BYTES} bytes")
            return answer.status_code, said
    except (httpx.HTTPError, httpx.InvalidURL, UnicodeError, TimeoutError) as error:
        raise Unavailable(f"--join: {address} does not answer as the head of this cluster: {str(error) or type(error).__name__}") from None
