"""Whose request it is: by its API key where keys are configured, else by what the client says."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway import metrics
from gateway.http_errors import error_response
from springtide.errors import InvalidRequest, SpringtideError, Unauthenticated

TENANT_HEADER = "x-springtide-tenant"
_GUARDED = "/v1/"


class ApiKeys:
    def __init__(self, api_keys: Mapping[str, str]) -> None:
        """The tenant of each key; of the keys, `sha256:` and their hexadecimal digest. Without any, clients say who they are."""
        self._api_keys = api_keys

    def of(self, authorization: str, named: str) -> str:
        """The tenant of a request with this `Authorization` that says it is `named`'s ("" for nothing). Raises Unauthenticated, and
        InvalidRequest when it names another tenant than its key's."""
        if not self._api_keys:
            return named
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise self._refused("an API key is required; send it as `Authorization: Bearer KEY`")
        # Looked up by its digest: how long that takes says nothing about the keys that there are.
        tenant = self._api_keys.get(f"sha256:{hashlib.sha256(key.strip().encode()).hexdigest()}")
        if tenant is None:
            raise self._refused("this API key is not known")
        if named not in ("", tenant):
            raise InvalidRequest(f"tenant: this API key is {tenant!r}'s, not {named!r}'s", param="tenant", code="wrong_tenant")
        return tenant

    @staticmethod
    def _refused(message: str) -> Unauthenticated:
        metrics.UNAUTHENTICATED.inc()
        return Unauthenticated(message, code="invalid_api_key")


class TenantGuard:
    """ASGI middleware. Refuses API requests before their bodies are read; the others find their tenant in `request.state.tenant`."""

    def __init__(self, app: ASGIApp, api_keys: ApiKeys) -> None:
        self._app = app
        self._api_keys = api_keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_GUARDED):
            headers = Headers(scope=scope)
            try:
                tenant = self._api_keys.of(headers.get("authorization", ""), headers.get(TENANT_HEADER, ""))
            except SpringtideError as error:
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["tenant"] = tenant
        await self._app(scope, receive, send)
