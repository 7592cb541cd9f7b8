"""What is kept, and what is remembered of it: `ContextCache`, its meter, and the form in which both are written down."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, NewType

from gateway.api_request import NOTHING, Conversation, Message, Speaker, Tool, ToolCall, ToolChoice, ToolMode
from springtide.ids import Incarnation, NodeId

CacheId = NewType("CacheId", str)


class Status(StrEnum):
    """How a context cache is doing."""

    PENDING = "pending"
    """No store holds it yet, or none does any more: it is being computed."""
    READY = "ready"
    """At least one store holds it, pinned."""
    ERROR = "error"
    """It cannot be computed."""
    INACTIVE = "inactive"
    """Its time is over. It can be extended, and is pending then."""


class Strength(StrEnum):
    """How strongly its blocks are pinned (docs/packages/kvstore.md, Pins)."""

    SOFT = "soft"
    """They go last of all."""
    HARD = "hard"
    """They stay; where a store has as many hard pins as it takes, the pin there is soft."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What its keeper knows of a context cache; nobody else changes it, but for what a new request of its owner begins anew."""

    status: Status = Status.PENDING
    error: str = ""
    held: Mapping[NodeId, Incarnation] = field(default_factory=dict)
    """The stores in which all its blocks were pinned when last looked at."""
    failures: int = 0
    """Consecutive tries to compute it that came to nothing."""
    breakdowns: int = 0
    """Of these, those in which whoever computed it broke down."""


@dataclass(frozen=True, slots=True)
class ContextCache:
    """A beginning of conversations that is kept. Times are Unix seconds. Raises ValueError, naming the field."""

    cache_id: CacheId
    tenant: str
    model: str
    """Empty: a request's marks made it."""
    tokens: int
    """Of the messages and tools as the template renders them."""
    blocks: int
    """Full blocks that every conversation which begins so has in common: what is kept."""
    created_at: float
    expires_at: float
    strength: Strength = Strength.SOFT
    replicas: int = 1
    """In how many stores it is wanted."""
    key_id: str = ""
    """Of the API key that it counts for. Empty: it was made without one."""
    marked: bool = False
    """A request's marks made it: it is not listed, and not computed anew when it is lost."""
    name: str = ""
    description: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    active_since: float = 0.0
    """When it was created, or was extended after its end."""
    stored_token_minutes: int = 0
    """Of the times before."""
    kept: Kept = Kept()

    def __post_init__(self) -> None:
        if self.blocks < 1:
            raise ValueError(f"ContextCache.blocks must be at least 1, not {self.blocks}")
        if self.replicas < 1:
            raise ValueError(f"ContextCache.replicas must be at least 1, not {self.replicas}")

    @property
    def pin_id(self) -> str:
        return f"context-cache:{self.cache_id}"

    @property
    def budgeted_tokens(self) -> int:
        """What it takes of its tenant's budget: its tokens in every store where it is wanted."""
        return self.tokens * self.replicas

    def expired(self, now: float) -> bool:
        return now >= self.expires_at

    def status(self, now: float) -> Status:
        """As clients are told: its end is not waited for until somebody looks."""
        return Status.INACTIVE if self.expired(now) else self.kept.status

    def token_minutes(self, now: float) -> int:
        """How long it has been kept, begun minutes counting whole."""
        active_s = max(0.0, min(now, self.expires_at) - self.active_since)
        return self.stored_token_minutes + self.tokens * math.ceil(active_s / 60)

    def with_kept(self, kept: Kept) -> ContextCache:
        """With what its keeper has found out."""
        return replace(self, kept=kept)

    def extended(self, expires_at: float, now: float) -> ContextCache:
        """With another end. One that had ended, or could not be computed, is pending."""
        if self.expired(now):
            stored = self.token_minutes(now)
            return replace(self, expires_at=expires_at, active_since=now, stored_token_minutes=stored, kept=Kept())
        if self.kept.status is Status.ERROR:
            return replace(self, expires_at=expires_at, kept=Kept())
        return replace(self, expires_at=expires_at)


@dataclass(frozen=True, slots=True)
class Meter:
    """What a context cache has taken and given, in tokens."""

    creation_tokens: int = 0
    """Its tokens, each time that it was computed."""
    calls: int = 0
    saved_tokens: int = 0
    """Found in the pool by those calls."""


@dataclass(frozen=True, slots=True)
class Content:
    """What a context cache is of: it never changes."""

    conversation: Conversation
    token_ids: tuple[int, ...]
    """What every conversation that begins so has in common."""


@dataclass(frozen=True, slots=True)
class Use:
    """The context cache that a request begins with, as it was then."""

    cache: ContextCache
    status: Status
    matches: bool = True
    """The request's messages and tools begin with those of the cache. Else it is answered as any other."""

    @property
    def promised_tokens(self) -> int:
        """Tokens that should be found in the pool."""
        return self.cache.tokens if self.matches and self.status is Status.READY else 0


class MissReason(StrEnum):
    """Why a request did not find what its cache keeps."""

    PENDING = "pending"
    """No store holds it just now: it is being computed."""
    INACTIVE = "inactive"
    """Its time was over."""
    ERROR = "error"
    MESSAGES_CHANGED = "messages_changed"
    """The request does not begin with its messages and tools."""
    NOT_HELD = "not_held"
    """It was said to be held, and was not found: it has been lost, or could not be read in time."""
    NEW = "new"
    """Of marks alone: nothing is remembered of what was not found."""


# ---- written down ----


def cache_json(cache: ContextCache) -> dict[str, Any]:
    kept = cache.kept
    return {
        "id": cache.cache_id,
        "model": cache.model,
        "tokens": cache.tokens,
        "blocks": cache.blocks,
        "created_at": cache.created_at,
        "expires_at": cache.expires_at,
        "strength": cache.strength.value,
        "replicas": cache.replicas,
        "key_id": cache.key_id,
        "marked": cache.marked,
        "name": cache.name,
        "description": cache.description,
        "metadata": dict(cache.metadata),
        "active_since": cache.active_since,
        "stored_token_minutes": cache.stored_token_minutes,
        "kept": {
            "status": kept.status.value,
            "error": kept.error,
            "held": dict(kept.held),
            "failures": kept.failures,
            "breakdowns": kept.breakdowns,
        },
    }


def cache_from(tenant: str, value: Mapping[str, Any]) -> ContextCache:
    kept = value["kept"]
    held = {NodeId(node_id): Incarnation(incarnation) for node_id, incarnation in kept["held"].items()}
    return ContextCache(
        cache_id=CacheId(value["id"]),
        tenant=tenant,
        model=value["model"],
        tokens=value["tokens"],
        blocks=value["blocks"],
        created_at=value["created_at"],
        expires_at=value["expires_at"],
        strength=Strength(value["strength"]),
        replicas=value["replicas"],
        key_id=value["key_id"],
        marked=value["marked"],
        name=value["name"],
        description=value["description"],
        metadata=value["metadata"],
        active_since=value["active_since"],
        stored_token_minutes=value["stored_token_minutes"],
        kept=Kept(Status(kept["status"]), kept["error"], held, kept["failures"], kept["breakdowns"]),
    )


def canonical(conversation: Conversation) -> dict[str, Any]:
    """What makes two conversations the same one: messages, tools, and what else the template sees; marks do not."""
    return {
        "messages": [message_json(message) for message in conversation.messages],
        "tools": [
            {"name": tool.name, "description": tool.description, "parameters": plain(tool.parameters), "strict": tool.strict}
            for tool in conversation.tools
        ],
        "template_options": plain(conversation.template_options),
    }


def message_json(message: Message) -> dict[str, Any]:
    """Without what is not there."""
    calls = [{"id": call.call_id, "name": call.name, "arguments": call.arguments} for call in message.tool_calls]
    whole = {
        "speaker": message.speaker.value,
        "content": message.content,
        "reasoning": message.reasoning,
        "tool_calls": calls,
        "tool_call_id": message.tool_call_id,
        "name": message.name,
    }
    return {name: value for name, value in whole.items() if value or name in ("speaker", "content")}


def plain(value: Any) -> Any:
    """JSON's own types, of what may be read-only mappings and tuples."""
    if isinstance(value, Mapping):
        return {str(name): plain(part) for name, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, (list, tuple)) else value


def conversation_from(value: Mapping[str, Any]) -> Conversation:
    messages = tuple(
        Message(
            speaker=Speaker(message["speaker"]),
            content=message["content"],
            reasoning=message.get("reasoning", ""),
            tool_calls=tuple(ToolCall(call["id"], call["name"], call["arguments"]) for call in message.get("tool_calls", ())),
            tool_call_id=message.get("tool_call_id", ""),
            name=message.get("name", ""),
        )
        for message in value["messages"]
    )
    tools = tuple(Tool(tool["name"], tool["description"], tool["parameters"] or NOTHING, tool["strict"]) for tool in value["tools"])
    choice = ToolChoice(ToolMode(value["tool_choice"]["mode"]), value["tool_choice"]["name"], value["tool_choice"]["parallel"])
    return Conversation(messages, tools, choice, template_options=value["template_options"] or NOTHING)


def content_bytes(content: Content) -> bytes:
    """Takes time in proportion to it."""
    choice = content.conversation.tool_choice
    chosen = {"mode": choice.mode.value, "name": choice.name, "parallel": choice.parallel}
    said = {**canonical(content.conversation), "tool_choice": chosen, "token_ids": content.token_ids}
    return json.dumps(said, separators=(",", ":")).encode()


def content_from(raw: bytes) -> Content:
    """Takes time in proportion to it."""
    value = json.loads(raw)
    return Content(conversation_from(value), tuple(value["token_ids"]))
