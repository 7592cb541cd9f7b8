"""The client of the join service: how a machine finds out whom to believe, is let in, and stays."""

from __future__ import annotations

import ssl
from typing import TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from deploy.ca.authority import authority_in
from deploy.join.tokens import Token
from deploy.join.words import JoinReply, JoinRequest, RenewReply, RenewRequest
from springtide.errors import InvalidRequest, SpringtideError, Unauthenticated, Unavailable
from springtide.tls import client_context

TIMEOUT_S = 10.0
MAX_BUNDLE_BYTES = 1 << 20
_Reply = TypeVar("_Reply", bound=BaseModel)


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
    async with _client(context) as http:
        answer = await _sent(address, http.get(f"https://{address}/ca"))
    if answer.status_code != httpx.codes.OK or len(answer.content) > MAX_BUNDLE_BYTES:
        raise Unavailable(f"--join: {address} is no join service of a cluster: it answers /ca with {answer.status_code}")
    return answer.content


async def _ask(address: str, path: str, authorities: bytes, asked: BaseModel, reply: type[_Reply]) -> _Reply:
    async with _client(client_context(authorities)) as http:
        answer = await _sent(address, http.post(f"https://{address}{path}", content=asked.model_dump_json()))
    try:
        if answer.status_code == httpx.codes.OK:
            return reply.model_validate_json(answer.content)
        refusal = answer.json()
        message, code = str(refusal["message"]), refusal.get("code")
    except (ValidationError, ValueError, KeyError, TypeError) as error:
        raise Unavailable(f"--join: {address} answers what is not understood: {error}") from None
    kinds: dict[int, type[SpringtideError]] = {401: Unauthenticated, 400: InvalidRequest}
    raise kinds.get(answer.status_code, Unavailable)(f"{address}: {message}", code=code)


def _client(context: ssl.SSLContext) -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=context, timeout=TIMEOUT_S, trust_env=False)


async def _sent(address: str, request: object) -> httpx.Response:
    try:
        response: httpx.Response = await request  # type: ignore[misc]  # a coroutine of httpx's
        return response
    except httpx.HTTPError as error:
        raise Unavailable(f"--join: {address} does not answer as the head of this cluster: {error or type(error).__name__}") from None
