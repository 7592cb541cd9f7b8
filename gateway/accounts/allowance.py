"""API keys and tenants as records: what each may have."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import dataclass, fields
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field, TypeAdapter

from springtide.errors import ModelNotFound

KEY_PREFIX = "sk-st-"
_KEY_BYTES = 32
_SHOWN_CHARACTERS = 4
MAX_NAME_LENGTH = 256
"""Characters of a tenant's or a key's name."""

Limit = Annotated[int, Field(ge=1, le=1 << 53)] | None
Name = Annotated[str, Field(max_length=MAX_NAME_LENGTH)]


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a key or a tenant may have. None: as much as there is."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    models: tuple[str, ...] = ()
    """Empty: all."""
    requests_per_minute: Limit = None
    tokens_per_minute: Limit = None
    """Prompt and output tokens together."""
    cache_tokens: Limit = None
    """Of contexts that are kept at a time; a key's are those that were made with it."""
    batch_lines: Limit = None
    """Of the tenant's batches that have not ended."""
    batch_tokens_per_minute: Limit = None
    """Prompt and output tokens of the lines of batches, which do not count as others."""


NO_LIMITS = Allowance()


@dataclass(frozen=True, slots=True)
class ApiKey:
    """An API key as it is remembered: by its digest, under which it is found."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", strict=True)

    key_id: Name
    tenant: Annotated[str, Field(min_length=1, max_length=MAX_NAME_LENGTH)]
    name: Name = ""
    ends_with: str = ""
    """The key's last characters, for people to know it by."""
    made_at: float = 0.0
    """This and the other times: seconds since 1970."""
    expires_at: float | None = None
    revoked_at: float | None = None
    allowance: Allowance = NO_LIMITS
    operator: bool = False
    """Its holder runs the cluster, and may see what all tenants do."""

    def usable(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


API_KEY = TypeAdapter(ApiKey)
ALLOWANCE = TypeAdapter(Allowance)
LIMITS = tuple(field.name for field in fields(Allowance) if field.name != "models")


@dataclass(frozen=True, slots=True)
class Caller:
    """Whose a request is."""

    tenant: str
    key_id: str = ""
    """Empty: without a key, where none is wanted."""
    of_key: Allowance = NO_LIMITS
    of_tenant: Allowance = NO_LIMITS
    operator: bool = False
    """May see what all tenants do; without keys, whoever is said to be no tenant's may."""

    def may_use(self, model: str) -> bool:
        return all(not allowance.models or model in allowance.models for allowance in (self.of_key, self.of_tenant))

    def check_model(self, model: str) -> None:
        """Raises ModelNotFound when this caller may not use it."""
        if not self.may_use(model):
            raise ModelNotFound(f"model {model!r} is not among those that this API key may use", param="model", code="model_not_found")

    @property
    def batch_lines(self) -> int | None:
        """Up to how many lines of its tenant's batches may be open for this caller to add to them."""
        limits = (self.of_key.batch_lines, self.of_tenant.batch_lines)
        return min((limit for limit in limits if limit is not None), default=None)


def new_key() -> str:
    """A key that nobody can guess."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def new_key_id() -> str:
    return f"key_{secrets.token_hex(6)}"


def digest_of(key: str) -> str:
    """By which a key is found: how long that takes says nothing about the keys that there are."""
    return f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def shown_end(key: str) -> str:
    return key[-_SHOWN_CHARACTERS:]


def as_json(record: ApiKey | Allowance) -> str:
    return (API_KEY.dump_json(record) if isinstance(record, ApiKey) else ALLOWANCE.dump_json(record)).decode()
