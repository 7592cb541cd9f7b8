"""From what a user says of a running cluster to where its processes are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from deploy.local.rundir import ClusterRecord, this_machines
from springtide.config import load_config
from springtide.credentials import OPEN, Credentials
from springtide.errors import Unavailable
from springtide.membership import Member, Membership
from springtide.tls import cluster_tls


@dataclass(frozen=True, slots=True)
class Where:
    """`redis_url` finds clusters of other machines; without it, the one of this machine that serves at `url` is meant."""

    url: str
    redis_url: str | None = None
    cluster: str = "springtide"


@dataclass(frozen=True, slots=True)
class Located:
    redis_url: str
    cluster: str
    members: Sequence[Member]
    record: ClusterRecord | None
    """Of a cluster of this machine."""
    credentials: Credentials
    """To speak with its processes: those of the record, or of secret and certificates in the environment."""


async def locate(where: Where) -> Located:
    """Raises Unavailable when there is no such cluster, or its Valkey does not answer."""
    record = None
    redis_url, cluster = where.redis_url, where.cluster
    if redis_url is not None:
        settings = load_config()  # of the environment
        secret = settings.cluster_secret
        credentials = OPEN if secret is None else Credentials(secret.get_secret_value().encode(), cluster, cluster_tls(settings.tls))
    else:
        record = this_machines(where.url, "; name its --url, or its --redis-url if it runs elsewhere")
        redis_url, cluster, credentials = record.redis_url, record.cluster, record.credentials
    async with _membership(redis_url, cluster, credentials) as membership:
        members = await membership.members()
    if members is None:
        raise Unavailable(f"Valkey at {without_password(redis_url)} does not answer")
    return Located(redis_url, cluster, members, record, credentials)


def without_password(redis_url: str) -> str:
    """The URL as it may be shown."""
    parts = urlsplit(redis_url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


@asynccontextmanager
async def _membership(redis_url: str, cluster: str, credentials: Credentials) -> AsyncIterator[Membership]:
    membership = Membership(redis_url, cluster, lease_s=1.0, credentials=credentials)
    try:
        yield membership
    finally:
        await membership.close()
