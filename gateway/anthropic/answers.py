"""What Anthropic's Messages API answers: whole and as a stream of events, errors, and models."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

from gateway.answer import message_for_client
from gateway.exchange import Json, dump, server_sent
from gateway.fields import json_object
from gateway.output import Answer, CallArguments, CallBegun, Choice, Content, Delta, Ending, Part, Reasoning
from springtide.errors import SpringtideError
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

_HOUR_S = 3600.0
_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesFormat:
    """A message, as a whole or as events. Made for one request."""

    media_type = "text/event-stream"
    pings = True

    def __init__(self, message_id: str, model: str, stop_sequences: Collection[str], shows_thinking: bool) -> None:
        self._id = message_id
        self._model = model
        self._stop_sequences = stop_sequences
        self._shows_thinking = shows_thinking
        self._started = False
        self._num_blocks = 0
        self._open = ""
        """The type of the block that is being written."""
        self._ending: Ending | None = None

    def begin(self) -> Iterable[bytes]:
        # The message's first event tells the prompt's tokens, which are known with the first delta.
        return ()

    def delta(self, delta: Delta, usage: Usage) -> Iterable[bytes]:
        yield from self._start(usage)
        for part in delta.parts:
            yield from self._part(part)
        self._ending = delta.ending or self._ending

    def end(self, usage: Usage) -> Iterable[bytes]:
        yield from self._start(usage)
        yield from self._close()
        yield _event("message_delta", delta={**self._stop(self._ending), "stop_details": None}, usage=usage_json(usage))
        yield _event("message_stop")

    def failed(self, error: SpringtideError) -> Iterable[bytes]:
        yield server_sent(error_json(error, self._id), "error")

    def whole(self, answer: Answer) -> Iterator[str]:
        choice = answer.choices[0]
        message = {**self._message(answer.usage), **self._stop(choice.ending), "content": list(self._blocks(choice))}
        yield dump(message)

    def _start(self, usage: Usage) -> Iterable[bytes]:
        if not self._started:
            self._started = True
            yield _event("message_start", message=self._message(usage))
            yield _event("ping")

    def _part(self, part: Part) -> Iterable[bytes]:
        match part:
            case Content(text):
                yield from self._block("text", {"text": ""})
                yield self._delta("text_delta", text=text)
            case Reasoning(text):
                yield from self._block("thinking", {"thinking": "", "signature": ""})
                if self._shows_thinking:
                    yield self._delta("thinking_delta", thinking=text)
            case CallBegun(_, call_id, name):
                yield from self._close()
                yield from self._block("tool_use", {"id": call_id, "name": name, "input": {}})
            case CallArguments(_, text):
                yield self._delta("input_json_delta", partial_json=text)

    def _block(self, kind: str, empty: Json) -> Iterable[bytes]:
        """Has a block of this kind open."""
        if self._open != kind:
            yield from self._close()
            self._open = kind
            yield _event("content_block_start", index=self._num_blocks, content_block={"type": kind, **empty})

    def _delta(self, kind: str, **piece: str) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta={"type": kind, **piece})

    def _close(self) -> Iterable[bytes]:
        if self._open:
            yield _event("content_block_stop", index=self._num_blocks)
            self._open = ""
            self._num_blocks += 1

    def _blocks(self, choice: Choice) -> Iterator[Json]:
        arguments = {call.number: text for call, text in choice.calls}
        for part in choice.parts:
            match part:
                case Content(text):
                    yield {"type": "text", "text": text}
                case Reasoning(text):
                    yield {"type": "thinking", "thinking": text if self._shows_thinking else "", "signature": ""}
                case CallBegun(number, call_id, name):
                    yield {"type": "tool_use", "id": call_id, "name": name, "input": json_object(arguments[number]) or {}}

    def _message(self, usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage_json(usage),
        }

    def _stop(self, ending: Ending | None) -> Json:
        """Why it stopped. With no token to be made, nothing has: the prompt alone was computed."""
        if ending is None or ending.finish is Finish.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(ending.stop, str) and ending.stop in self._stop_sequences:
            return {"stop_reason": "stop_sequence", "stop_sequence": ending.stop}
        return {"stop_reason": "tool_use" if ending.called else "end_turn", "stop_sequence": None}


def usage_json(usage: Usage) -> Json:
    """Of the prompt, what was found, what was computed and is kept, and the rest are counted apart."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens - usage.num_kept,
        "cache_creation_input_tokens": usage.num_kept,
        "cache_creation": {
            "ephemeral_5m_input_tokens": sum(kept.tokens for kept in usage.kept_tokens if kept.ttl_s < _HOUR_S),
            "ephemeral_1h_input_tokens": sum(kept.tokens for kept in usage.kept_tokens if kept.ttl_s >= _HOUR_S),
        },
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
    }


def error_json(error: SpringtideError, request_id: str = "") -> Json:
    kind = _ERROR_TYPES.get(error.http_status)
    if kind is None:
        kind = "invalid_request_error" if error.http_status < 500 else "api_error"
    told: Json = {"type": kind, "message": message_for_client(error, request_id)}
    if error.code is not None:
        told["details"] = {"error_code": error.code}
    return {"type": "error", "error": told, "request_id": request_id or None}


def model_json(name: str, created: int, context_length: int) -> Json:
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context_length,
        "max_tokens": context_length,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent({"type": kind, **fields}, kind)
