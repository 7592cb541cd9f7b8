"""What OpenAI's APIs answer: whole and in chunks, for chat and for plain completions, and errors."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine.tokenizer.tokenizer import Tokenizer
from gateway.answer import Delta, PlacedToken, message_for_client
from springtide.errors import SpringtideError
from springtide.protocol.outputs import Finish
from springtide.protocol.usage import Usage

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI's choice."""
_TOKENS_A_PIECE = 16


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def error_body(error: SpringtideError, request_id: str = "") -> Json:
    return error_json(message_for_client(error, request_id), error.openai_type, error.code, error.param)


def error_json(message: str, kind: str, code: str | None, param: str | None = None) -> Json:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(slots=True)
class _Collected:
    text: str = ""
    tokens: list[PlacedToken] = field(default_factory=list)
    finish: Finish | None = None


class Format(Protocol):
    """How one endpoint writes its answers. Made for one request."""

    def chunks(self, delta: Delta) -> list[Json]:
        """Stream events for a delta, possibly none."""
        ...

    def last_chunks(self, usage: Usage) -> list[Json]:
        """Stream events at the end of a whole answer, possibly none."""
        ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[str]:
        """The JSON text of the whole answer, in pieces each of which takes a millisecond or so: with log-probabilities, all of it may
        take seconds."""
        ...


class _Envelope:
    def __init__(self, request_id: str, model: str, wants_logprobs: bool, wants_usage: bool, tokenizer: Tokenizer) -> None:
        self._head: Json = {"id": request_id, "created": int(time.time()), "model": model}
        self._wants_logprobs = wants_logprobs
        self._wants_usage = wants_usage
        self._tokenizer = tokenizer

    def _whole(self, kind: str, choices: Iterable[Iterator[str]], usage: Usage) -> Iterator[str]:
        yield dump({**self._head, "object": kind, "usage": usage_json(usage)})[:-1] + ',"choices":['
        for number, pieces in enumerate(choices):
            yield "," if number else ""
            yield from pieces
        yield "]}"

    def _event(self, kind: str, choices: list[Json], usage: Usage | None = None) -> Json:
        event = {**self._head, "object": kind, "choices": choices}
        if self._wants_usage:
            event["usage"] = None if usage is None else usage_json(usage)
        return event


class ChatFormat(_Envelope):
    CHUNK, WHOLE = "chat.completion.chunk", "chat.completion"

    def __init__(self, request_id: str, model: str, wants_logprobs: bool, wants_usage: bool, tokenizer: Tokenizer) -> None:
        super().__init__(request_id, model, wants_logprobs, wants_usage, tokenizer)
        self._introduced: set[int] = set()

    def chunks(self, delta: Delta) -> list[Json]:
        chunks = []
        if delta.index not in self._introduced:
            self._introduced.add(delta.index)
            chunks.append(self._chunk(delta.index, {"role": "assistant", "content": ""}, (), None))
        if delta.text or (delta.tokens and self._wants_logprobs):
            chunks.append(self._chunk(delta.index, {"content": delta.text}, delta.tokens, None))
        if delta.finish is not None:
            chunks.append(self._chunk(delta.index, {}, (), delta.finish))
        return chunks

    def _chunk(self, index: int, content: Json, tokens: Sequence[PlacedToken], finish: Finish | None) -> Json:
        logprobs = self._logprobs(tokens) if tokens else None
        return self._event(self.CHUNK, [{"index": index, "delta": content, "logprobs": logprobs, "finish_reason": finish}])

    def last_chunks(self, usage: Usage) -> list[Json]:
        return [self._event(self.CHUNK, [], usage)] if self._wants_usage else []

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[str]:
        return self._whole(self.WHOLE, (self._choice(index, choice) for index, choice in _collect(deltas)), usage)

    def _choice(self, index: int, choice: _Collected) -> Iterator[str]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        yield dump({"index": index, "message": message, "finish_reason": choice.finish})[:-1] + ',"logprobs":'
        if not self._wants_logprobs:
            yield "null}"
            return
        yield '{"content":'
        yield from _listed(choice.tokens, self._content)
        yield ',"refusal":null}}'

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._content(placed) for placed in tokens], "refusal": None}

    def _content(self, placed: PlacedToken) -> Json:
        return {
            **self._entry(placed.token.token_id, placed.token.logprob),
            "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in placed.token.top],
        }

    def _entry(self, token_id: int, logprob: float | None) -> Json:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": self._tokenizer.token_text(token_id), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionFormat(_Envelope):
    KIND = "text_completion"

    def chunks(self, delta: Delta) -> list[Json]:
        if not (delta.text or delta.finish is not None or (delta.tokens and self._wants_logprobs)):
            return []
        logprobs = self._logprobs(delta.tokens)
        return [self._event(self.KIND, [{"index": delta.index, "text": delta.text, "logprobs": logprobs, "finish_reason": delta.finish}])]

    def last_chunks(self, usage: Usage) -> list[Json]:
        return [self._event(self.KIND, [], usage)] if self._wants_usage else []

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Iterator[str]:
        return self._whole(self.KIND, (self._choice(index, choice) for index, choice in _collect(deltas)), usage)

    def _choice(self, index: int, choice: _Collected) -> Iterator[str]:
        yield dump({"index": index, "text": choice.text, "finish_reason": choice.finish})[:-1] + ',"logprobs":'
        if not self._wants_logprobs:
            yield "null}"
            return
        for number, (name, column) in enumerate(self._columns().items()):
            yield f'{"," if number else "{"}"{name}":'
            yield from _listed(choice.tokens, column)
        yield "}}"

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {name: [column(placed) for placed in tokens] for name, column in self._columns().items()}

    def _columns(self) -> dict[str, Callable[[PlacedToken], Any]]:
        text = self._tokenizer.token_text
        return {
            "tokens": lambda placed: text(placed.token.token_id),
            "token_logprobs": lambda placed: _finite(placed.token.logprob),
            "top_logprobs": lambda placed: {text(token_id): _finite(logprob) for token_id, logprob in placed.token.top},
            "text_offset": lambda placed: placed.offset,
        }


def dump(data: Json | list[Any]) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


def _listed(tokens: Sequence[PlacedToken], entry: Callable[[PlacedToken], Any]) -> Iterator[str]:
    """A JSON list with an entry for each token, in pieces."""
    yield "["
    for begin in range(0, len(tokens), _TOKENS_A_PIECE):
        yield ("," if begin else "") + dump([entry(placed) for placed in tokens[begin : begin + _TOKENS_A_PIECE]])[1:-1]
    yield "]"


def _finite(logprob: float | None) -> float | None:
    """What JSON can hold; a model whose numbers have overflowed may give anything."""
    if logprob is None:
        return None
    return min(logprob, 0.0) if logprob > LEAST_LOGPROB else LEAST_LOGPROB


def _collect(deltas: Sequence[Delta]) -> list[tuple[int, _Collected]]:
    choices: dict[int, _Collected] = {}
    texts: dict[int, list[str]] = {}
    for delta in deltas:
        choice = choices.setdefault(delta.index, _Collected())
        texts.setdefault(delta.index, []).append(delta.text)
        choice.tokens += delta.tokens
        choice.finish = delta.finish or choice.finish
    for index, choice in choices.items():
        choice.text = "".join(texts[index])
    return sorted(choices.items())
