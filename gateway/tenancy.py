"""What keeps tenants apart: API keys, which say whose request it is, and a namespace for the blocks of each."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping, Sequence

from gateway import metrics
from gateway.events import Generation
from springtide.blocks import block_keys, namespace_root
from springtide.errors import InvalidRequest, Unauthenticated
from springtide.ids import BlockKey


class ApiKeys:
    """The API keys, which say whose a request is; where there are none, the client says so."""

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


class TenantHashing:
    """Hashing by tenant. Each has a namespace of its own, and one more for each of its salts: nobody's blocks match another's."""

    def __init__(self, model_fingerprint: str, kv_dtype: str, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        root = functools.partial(namespace_root, model_fingerprint, kv_dtype, block_tokens)
        self._root = functools.lru_cache(maxsize=4096)(root)

    def namespace(self, generation: Generation) -> BlockKey:
        return self._root(f"{generation.tenant}\0{generation.salt}" if generation.salt else generation.tenant)

    def keys(self, generation: Generation, token_ids: Sequence[int]) -> tuple[BlockKey, ...]:
        return tuple(block_keys(self.namespace(generation), token_ids, self.block_tokens))
