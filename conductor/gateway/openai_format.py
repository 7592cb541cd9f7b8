"""The bodies of OpenAI's answers: whole and in chunks, for chat and for plain completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from conductor.gateway.events import Finish
from conductor.gateway.reply import Delta, Usage
from conductor.gateway.text import PlacedToken
from engine.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have. OpenAI's choice."""


def usage_json(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


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

    def usage_chunk(self, usage: Usage) -> Json: ...

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Json: ...


class _Envelope:
    def __init__(self, request_id: str, model: str, wants_logprobs: bool, wants_usage: bool, tokenizer: Tokenizer) -> None:
        self._head: Json = {"id": request_id, "created": int(time.time()), "model": model}
        self._wants_logprobs = wants_logprobs
        self._wants_usage = wants_usage
        self._tokenizer = tokenizer

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

    def usage_chunk(self, usage: Usage) -> Json:
        return self._event(self.CHUNK, [], usage)

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": self._logprobs(choice.tokens),
                "finish_reason": choice.finish,
            }
            for index, choice in _collect(deltas)
        ]
        return {**self._head, "object": self.WHOLE, "choices": choices, "usage": usage_json(usage)}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {
            "content": [
                {
                    **self._entry(placed.token.token_id, placed.token.logprob),
                    "top_logprobs": [self._entry(token_id, logprob) for token_id, logprob in placed.token.top],
                }
                for placed in tokens
            ],
            "refusal": None,
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

    def usage_chunk(self, usage: Usage) -> Json:
        return self._event(self.KIND, [], usage)

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> Json:
        choices = [
            {"index": index, "text": choice.text, "logprobs": self._logprobs(choice.tokens), "finish_reason": choice.finish}
            for index, choice in _collect(deltas)
        ]
        return {**self._head, "object": self.KIND, "choices": choices, "usage": usage_json(usage)}

    def _logprobs(self, tokens: Sequence[PlacedToken]) -> Json | None:
        if not self._wants_logprobs:
            return None
        return {
            "tokens": [self._tokenizer.token_text(placed.token.token_id) for placed in tokens],
            "token_logprobs": [_finite(placed.token.logprob) for placed in tokens],
            "top_logprobs": [
                {self._tokenizer.token_text(token_id): _finite(logprob) for token_id, logprob in placed.token.top} for placed in tokens
            ],
            "text_offset": [placed.offset for placed in tokens],
        }


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
