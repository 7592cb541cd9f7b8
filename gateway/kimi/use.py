"""How a request of Kimi's names the context cache that it begins with: by headers, or by a first message of the role `cache`; and what the
answer's headers say of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gateway.api_request import CacheUse
from gateway.caching.context import Use
from springtide.errors import InvalidRequest
from springtide.protocol.usage import Usage

CACHE_ROLE = "cache"
_HEADER = "x-msh-context-cache"
_MAX_NUMBER = 10


def use_of_message(content: str, field: str) -> CacheUse:
    """What `cache_id=ID;reset_ttl=3600;dry_run=1` or `tag=NAME` says. Raises InvalidRequest, naming `field`."""
    said: dict[str, str] = {}
    for part in content.split(";"):
        name, equals, value = part.partition("=")
        if not equals or not value or name in said or name not in ("cache_id", "tag", "reset_ttl", "dry_run"):
            right = "must be like 'cache_id=ID;reset_ttl=3600;dry_run=1', or with tag=NAME"
            raise InvalidRequest(f"{field} {right}, not {part[:100]!r}", param=field)
        said[name] = value
    if ("cache_id" in said) == ("tag" in said):
        raise InvalidRequest(f"{field} must name either a cache_id or a tag", param=field)
    return CacheUse(
        cache_id=said.get("cache_id", ""),
        tag=said.get("tag", ""),
        extend_s=_seconds(said["reset_ttl"], field) if "reset_ttl" in said else None,
        dry_run=_flag(said.get("dry_run", "0"), field),
    )


def use_of_headers(headers: Mapping[str, str], otherwise: CacheUse) -> CacheUse:
    """`otherwise`, or with the cache that the headers name: the request has its messages and tools too. Raises InvalidRequest."""
    cache_id = headers.get(_HEADER, "")
    if not cache_id or otherwise.named:
        return otherwise
    ttl = headers.get(f"{_HEADER}-reset-ttl")
    return replace(
        otherwise,
        cache_id=cache_id,
        in_prompt=True,
        extend_s=None if ttl is None else _seconds(ttl, f"{_HEADER}-reset-ttl"),
        dry_run=_flag(headers.get(f"{_HEADER}-dryrun", "0"), f"{_HEADER}-dryrun"),
    )


def cache_headers(use: Use, usage: Usage | None) -> Mapping[str, str]:
    """Of an answer to a request that begins with a cache. Where they go out before the answer, they say what is to be expected."""
    if not use.matches:
        return {}
    saved = use.promised_tokens if usage is None or not usage.prompt_tokens else min(usage.cached_tokens, use.cache.tokens)
    return {
        "Msh-Context-Cache-Id": use.cache.cache_id,
        "Msh-Context-Cache-Token-Saved": str(saved),
        "Msh-Context-Cache-Token-Exp": str(int(use.cache.expires_at)),
    }


def _seconds(text: str, field: str) -> float:
    if not text.isdecimal() or len(text) > _MAX_NUMBER:
        raise InvalidRequest(f"{field}: reset_ttl must be a number of seconds, not {text[:100]!r}", param=field)
    return float(text)


def _flag(text: str, field: str) -> bool:
    if text not in ("0", "1"):
        raise InvalidRequest(f"{field}: dry_run must be 0 or 1, not {text[:100]!r}", param=field)
    return text == "1"
