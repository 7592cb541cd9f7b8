"""What the client takes and gives."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from springtide.protocol.usage import Usage

Message = Mapping[str, Any]
Prompt = str | Sequence[int]


@dataclass(frozen=True, slots=True)
class ToolCallPiece:
    """A piece of a call of a tool in a stream: the first one of call `number` has its id and its name."""

    number: int
    call_id: str = ""
    name: str = ""
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class Chunk:
    """An event of a stream. `finish_reason` comes with the last of a choice, `usage` alone at the very end."""

    received_at: float
    """Seconds on time.monotonic's clock."""
    text: str
    index: int = 0
    finish_reason: str | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: tuple[ToolCallPiece, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCalled:
    """A tool that the model wants called. `arguments` is JSON text."""

    call_id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any]:
        """The arguments. Raises ValueError where the model did not write an object of JSON."""
        value = json.loads(self.arguments)
        if not isinstance(value, dict):
            raise ValueError(f"the arguments of {self.name} are no object: {self.arguments[:100]}")
        return value


@dataclass(frozen=True, slots=True)
class Answer:
    """The first choice of a whole answer to a chat."""

    text: str
    finish_reason: str
    usage: Usage
    reasoning: str = ""
    tool_calls: tuple[ToolCalled, ...] = ()

    def message(self) -> dict[str, Any]:
        """It as a message of the conversation that goes on."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.tool_calls:
            message["tool_calls"] = [
                {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message


@dataclass(frozen=True, slots=True)
class Cache:
    """A context that is kept in the KV pool."""

    cache_id: str
    status: str
    """pending, ready, error, or inactive when it has expired."""
    tokens: int
    expires_at: int
    """Unix seconds."""
    name: str = ""
    metadata: Mapping[str, str] = field(default_factory=dict)
    error: str = ""

    def as_message(self, *, reset_ttl_s: int | None = None) -> Message:
        """The first message of a conversation that goes on from it, in the place of the messages that it holds."""
        reset = "" if reset_ttl_s is None else f";reset_ttl={reset_ttl_s}"
        return {"role": "cache", "content": f"cache_id={self.cache_id}{reset}"}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """One request of a batch, and what it is called there."""

    custom_id: str
    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests that are answered in idle capacity."""

    batch_id: str
    status: str
    total: int
    completed: int
    failed: int
    output_file_id: str | None
    error_file_id: str | None
    errors: tuple[str, ...] = ()

    @property
    def over(self) -> bool:
        """Nothing of it will be answered any more."""
        return self.status in ("completed", "failed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class BatchResult:
    """What came of one request of a batch."""

    custom_id: str
    status_code: int
    body: Mapping[str, Any]
    """The answer, or `{"error": …}`."""
